"""vLLM on two ranks, data, tensor and expert parallel: rows, forced rows, weights and versions are those of one rank.

Rows of two ranks are compared with the trainer that replays them, because two ranks round otherwise than one.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Engine, Request, Sampling
from router_replay.errors import EngineError
from tests.engines.conftest import (
    ENVIRONMENT,
    GREEDY,
    PROMPT_TOKENS,
    SHAPE,
    Checkpoints,
    ended_before,
    environment,
    midway,
    prompt,
)
from tests.makers import random_routes

pytest.importorskip("vllm", reason="vLLM is not installed")

EXPERTS = {
    "enable_expert_parallel": True,
    "worker_extension_cls": "tests.engines.vllm.cpu_experts.Experts",
}
LAYOUTS = {
    "data parallel": {
        "data_parallel_size": 2,
        "worker_extension_cls": "tests.engines.vllm.cpu_collectives.Collectives",
    },
    "tensor parallel": {"tensor_parallel_size": 2},
    # Each rank holds half of the experts. Tensor-parallel ranks compute all tokens, data-parallel ranks exchange them.
    "expert and tensor parallel": {"tensor_parallel_size": 2, **EXPERTS},
    "expert and data parallel": {"data_parallel_size": 2, **EXPERTS},
}
REQUESTS = 6  # for two data-parallel ranks: vLLM gives each rank some of them


@pytest.fixture(scope="module", params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Engine]:
    from router_replay.engines.vllm.inprocess import VllmEngine

    with environment(**ENVIRONMENT):
        engine = VllmEngine(checkpoints.a, **SHAPE, **LAYOUTS[request.param])
    with engine:
        yield engine


@pytest.fixture
def engine(ranks: Engine, checkpoints: Checkpoints) -> Iterator[Engine]:
    yield ranks
    if ranks.version != 0:
        ranks.update_weights(checkpoints.a, 0)


def reports(engine: Engine) -> list[dict[str, Any]]:
    """The reports of all workers, where `engine.report()` is that of the first."""
    transport = engine._connected.transport  # type: ignore[attr-defined]
    answers: list[dict[str, Any]] = engine._wait(transport.call_all("router_replay_report"))  # type: ignore[attr-defined]
    return answers


def test_every_rank_answers_the_plugins_calls(engine: Engine) -> None:
    assert len(reports(engine)) == 2
    assert all(report["forced_routes"] and report["captures"] for report in reports(engine))


def test_rows_are_those_that_the_ranks_used(engine: Engine, checkpoints: Checkpoints, trainer: Any) -> None:
    completions = engine.generate([Request(prompt(seed), GREEDY) for seed in range(REQUESTS)])
    for seed, completion in enumerate(completions):
        assert len(completion.routes) == PROMPT_TOKENS + 20 - 1
        assert trainer.gap(checkpoints.a, prompt(seed), completion, completion.routes).max() < 1e-4


def test_forced_and_free_requests_share_the_batches_of_all_ranks(
    engine: Engine, checkpoints: Checkpoints, trainer: Any
) -> None:
    before = [report["forced_rows"] for report in reports(engine)]
    forced = [random_routes(PROMPT_TOKENS, engine.spec, seed=seed) if seed % 3 else None for seed in range(REQUESTS)]
    requests = [Request(prompt(seed), GREEDY, forced_routes=rows) for seed, rows in enumerate(forced)]
    for seed, completion in enumerate(engine.generate(requests)):
        rows = forced[seed]
        assert rows is None or completion.routes[:PROMPT_TOKENS].same_sets(rows)
        assert trainer.gap(checkpoints.a, prompt(seed), completion, completion.routes).max() < 1e-4
    written = [report["forced_rows"] - old for report, old in zip(reports(engine), before, strict=True)]
    whole = PROMPT_TOKENS * sum(rows is not None for rows in forced)
    # Tensor-parallel ranks compute the same tokens, data-parallel ranks each their own.
    assert written == [whole, whole] or (sum(written) == whole and min(written) > 0)


def test_new_weights_reach_every_rank(engine: Engine, checkpoints: Checkpoints, trainer: Any) -> None:
    engine.update_weights(checkpoints.b, 1)
    assert [report["weight_updates"] > 0 for report in reports(engine)] == [True, True]
    completions = engine.generate([Request(prompt(seed), GREEDY) for seed in range(REQUESTS)])
    for seed, completion in enumerate(completions):
        assert trainer.gap(checkpoints.b, prompt(seed), completion, completion.routes).max() < 1e-4


def test_weights_that_one_file_lacks_are_refused_by_all(engine: Engine, tmp_path: pathlib.Path) -> None:
    with pytest.raises(EngineError, match=r"no \.safetensors file in"):
        engine.update_weights(str(tmp_path), 1)
    assert engine.version == 0


def test_a_swap_that_keeps_requests_knows_the_progress_of_every_rank(
    engine: Engine, checkpoints: Checkpoints, trainer: Any
) -> None:
    """Also where the samples of one request run on different ranks."""
    requests = [Request(prompt(seed), Sampling(150, n=2, ignore_eos=True)) for seed in range(2)]
    landed = asyncio.run(
        midway(
            engine,
            requests,
            lambda: engine.update_weights(checkpoints.b, 1, "keep"),
            lambda: engine.update_weights(checkpoints.a, 0),
            too_late=ended_before,
        )
    )
    for seed, samples in enumerate(landed):
        for completion in samples:
            old = int((completion.versions == 0).sum())
            assert 0 < old < 150
            assert completion.versions.tolist() == [0] * old + [1] * (150 - old)
            gap = np.abs(trainer.logprobs(checkpoints.a, prompt(seed), completion) - completion.logprobs)
            assert gap[:old].max() < 1e-3 < gap[old : old + 3].max()
