"""Two data-parallel ranks behind one URL: the answers of every rank reach the client, or the server is refused.

test_parallel.py has engines of several ranks in process.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from router_replay.engines import Engine, Request
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.samples import progress_of_all
from router_replay.errors import EngineError
from tests.engines.conftest import (
    GREEDY,
    LONG,
    PROMPT_TOKENS,
    Checkpoints,
    Trainer,
    ended_before,
    midway,
    prompt,
    start_server,
)
from tests.makers import random_routes

NAMES = [f"rr-{number:032x}" for number in range(3)]
ROOT = pathlib.Path(__file__).parents[3]  # vLLM's CPU build lacks two collectives, which a test module adds


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
    collectives = "--worker-extension-cls=tests.engines.vllm.cpu_collectives.Collectives"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    server = start_server(checkpoints.a, log, "--data-parallel-size=2", collectives, PYTHONPATH=path)
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
