"""Two data-parallel ranks behind one URL: the answers of every rank reach the client, or the server is refused.

test_parallel.py has engines of several ranks in process.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from router_replay.engines import Engine, Request
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.samples import progress_of_all
from router_replay.engines.vllm.serve import MODULE
from router_replay.engines.vllm.versions import installed_version, model_runner, numbers_of
from router_replay.errors import EngineError
from tests.engines.conftest import (
    ENVIRONMENT,
    GREEDY,
    LONG,
    PROMPT_TOKENS,
    Checkpoints,
    Server,
    Trainer,
    dropped,
    ended_before,
    metric,
    midway,
    not_aborted,
    prompt,
    running,
    start_command,
    start_server,
)
from tests.engines.stub import eventually
from tests.makers import random_routes

NAMES = [f"rr-{number:032x}" for number in range(3)]
ROOT = pathlib.Path(__file__).parents[3]
PATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
# vLLM's CPU build lacks two collectives, which a module of the tests adds.
TWO_RANKS = ("--data-parallel-size=2", "--worker-extension-cls=tests.engines.vllm.cpu_collectives.Collectives")


def test_the_progress_of_all_ranks_is_merged() -> None:
    """Two data-parallel ranks of two tensor-parallel workers each; samples of the last request run on both."""
    first = {f"generate-tokens-{NAMES[0]}": 7, f"0_{NAMES[2]}": 3}
    second = {f"cmpl-{NAMES[1]}-0": 5, f"1_{NAMES[2]}": 4}
    merged = {NAMES[0]: {0: 7}, NAMES[1]: {0: 5}, NAMES[2]: {0: 3, 1: 4}}
    assert progress_of_all([first, first, second, second]) == merged


def test_tensor_parallel_ranks_that_do_not_agree_are_an_error() -> None:
    with pytest.raises(EngineError, match="two workers computed 7 and 8 rows of one request"):
        progress_of_all([{NAMES[0]: 7}, {NAMES[0]: 8}])


@pytest.fixture(scope="module")
def ranks(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHttpEngine]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    log = tmp_path_factory.mktemp("ranks") / "log"
    server = start_server(checkpoints.a, log, *TWO_RANKS, PYTHONPATH=PATH)
    try:
        engine = server.wait(lambda: VllmHttpEngine(server.url), 600)
        assert isinstance(engine, VllmHttpEngine)
        with engine:
            yield engine
    finally:
        server.kill()


@pytest.fixture
def engine(ranks: VllmHttpEngine, checkpoints: Checkpoints) -> Iterator[Engine]:
    yield ranks
    if ranks.version != 0:
        ranks.update_weights(checkpoints.a, 0)


def counted(engine: Engine, name: str) -> list[int]:
    """A counter in the reports of both ranks."""
    transport = engine._connected.transport  # type: ignore[attr-defined]
    reports = engine._wait(transport.call_all("router_replay_report"))  # type: ignore[attr-defined]
    return [report[name] for report in reports]


def test_rows_of_both_ranks_are_forced_and_returned(engine: Engine, checkpoints: Checkpoints, trainer: Trainer) -> None:
    before = counted(engine, "forced_rows")
    forced = [random_routes(PROMPT_TOKENS, engine.spec, seed=seed) if seed % 3 else None for seed in range(6)]
    requests = [Request(prompt(seed), GREEDY, forced_routes=rows) for seed, rows in enumerate(forced)]
    for seed, completion in enumerate(engine.generate(requests)):
        rows = forced[seed]
        assert rows is None or completion.routes[:PROMPT_TOKENS].same_sets(rows)
        assert trainer.gap(checkpoints.a, prompt(seed), completion, completion.routes).max() < 1e-4
    written = [after - old for after, old in zip(counted(engine, "forced_rows"), before, strict=True)]
    assert sum(written) == 4 * PROMPT_TOKENS
    assert min(written) > 0


def test_requests_of_both_ranks_that_are_kept_say_where_the_weights_changed(
    engine: Engine, checkpoints: Checkpoints, trainer: Trainer
) -> None:
    landed = asyncio.run(
        midway(
            engine,
            [Request(prompt(seed), LONG) for seed in range(4)],
            lambda: engine.update_weights(checkpoints.b, 1, "keep"),
            lambda: engine.update_weights(checkpoints.a, 0),
            too_late=ended_before,
        )
    )
    assert min(counted(engine, "weight_updates")) > 0
    for seed, [completion] in enumerate(landed):
        old = int((completion.versions == 0).sum())
        assert completion.versions.tolist() == [0] * old + [1] * (150 - old)
        gap = np.abs(trainer.logprobs(checkpoints.a, prompt(seed), completion) - completion.logprobs)
        assert gap[:old].max() < 1e-3 < gap[old : old + 3].max()


def test_new_weights_reach_both_ranks(engine: Engine, checkpoints: Checkpoints, trainer: Trainer) -> None:
    engine.update_weights(checkpoints.b, 1)
    for seed, completion in enumerate(engine.generate([Request(prompt(seed), GREEDY) for seed in range(4)])):
        assert trainer.gap(checkpoints.b, prompt(seed), completion, completion.routes).max() < 1e-4


# -- a server without the plugin ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock_server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Has the route for token ids, and is not in development mode."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    command = [sys.executable, "-m", MODULE, "--model", checkpoints.a, *TWO_RANKS]
    command += ["--enable-return-routed-experts", "--enable-scale-out"]
    variables = {**os.environ, **ENVIRONMENT, **model_runner(installed_version()), "ROUTER_REPLAY_VLLM": "0"}
    server = start_command(command, tmp_path_factory.mktemp("stock_ranks") / "log", {**variables, "PYTHONPATH": PATH})
    yield server
    server.kill()


@pytest.fixture(scope="module")
def stock(stock_server: Server) -> Iterator[Engine]:
    with stock_server.wait(lambda: VllmHttpEngine(stock_server.url), 600) as engine:
        yield engine


def test_a_server_without_the_plugin_captures_on_both_ranks(
    stock: Engine, stock_server: Server, checkpoints: Checkpoints, trainer: Trainer
) -> None:
    for seed, completion in enumerate(stock.generate([Request(prompt(seed), GREEDY) for seed in range(6)])):
        assert trainer.gap(checkpoints.a, prompt(seed), completion, completion.routes).max() < 1e-4
    sampled = metric(stock_server, "vllm:generation_tokens_total{")
    assert len(sampled) == 2
    assert min(sampled) > 0


def test_an_abort_reaches_the_ranks_of_its_requests(stock: Engine, stock_server: Server) -> None:
    """From 0.32 on, the route for token ids comes with a call that aborts; before, nothing comes back."""
    requests = [Request(prompt(seed), LONG) for seed in range(4)]

    returns_tokens = numbers_of(installed_version()) >= (0, 32)
    aborting = midway(stock, requests, stock.abort, too_late=not_aborted)
    landed = asyncio.run(aborting if returns_tokens else dropped(stock, stock_server, requests))
    assert all(completion.finish_reason == "abort" for [completion] in landed)
    assert all((len(completion.token_ids) > 0) == returns_tokens for [completion] in landed)
    eventually(lambda: running(stock_server) == 0)
