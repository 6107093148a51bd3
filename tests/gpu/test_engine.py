"""Test a real vLLM on the device against the trainer: captured rows, forced rows through CUDA graphs, new weights."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from router_replay.engines import Request
from router_replay.engines.vllm.weights import checkpoint_tensors, share
from tests.gpu.conftest import SAMPLING, Trainer, prompts
from tests.makers import random_routes


def test_the_captured_rows_explain_the_log_probs(engine: Any, trainer: Trainer) -> None:
    """Random rows are forced on all prompt tokens. The trainer agrees with these rows, not with a neighbour's."""
    assert engine.report()["delivery"] == "packed"
    requests = [
        Request(tokens, SAMPLING, forced_routes=random_routes(60, engine.spec, seed))
        for seed, tokens in enumerate(prompts(16, 60))
    ]
    before = engine.report()["forced_rows"]
    done = engine.generate(requests)
    assert engine.report()["forced_rows"] - before >= 16 * 60
    for request, completion in zip(requests, done, strict=True):
        assert completion.routes[:60].same_sets(request.forced_routes)
    assert trainer.gap(requests, done) < 0.1 * trainer.gap(requests, done, [*done[1:], done[0]])


def test_one_forced_token_in_a_running_batch(engine: Any) -> None:
    """A prompt of one token has the shape of a decode step, so its forced row goes through a full CUDA graph."""
    rows = [random_routes(1, engine.spec, seed) for seed in range(8)]
    requests = [
        Request(tokens, SAMPLING, forced_routes=row) for tokens, row in zip(prompts(8, 1, 7), rows, strict=True)
    ]
    for completion, row in zip(engine.generate(requests), rows, strict=True):
        assert completion.routes[:1].same_sets(row)


def test_free_requests_beside_forced_ones_choose_for_themselves(engine: Any, trainer: Trainer) -> None:
    tokens = prompts(8, 60, seed=1)
    rows = [random_routes(60, engine.spec, seed) if seed % 2 else None for seed in range(8)]
    requests = [Request(one, SAMPLING, forced_routes=row) for one, row in zip(tokens, rows, strict=True)]
    done = engine.generate(requests)
    shares = trainer.agreement(requests, done)
    assert min(shares[0::2]) > 0.7  # bfloat16 changes some choices
    assert max(shares[1::2]) < 0.6  # most rows of these are random: 4 of 32 agree by chance


def test_new_weights_are_those_that_were_pushed(
    engine: Any, trainer: Trainer, new_trainer: Trainer, folders: list[pathlib.Path]
) -> None:
    """By shared memory to the second checkpoint, and by its folder back to the first."""
    requests = [Request(tokens, SAMPLING) for tokens in prompts(16, 60, seed=2)]
    with share(checkpoint_tensors(new_trainer.model)) as weights:
        engine.update_weights(weights, 1)
    try:
        done = engine.generate(requests)
        assert {int(version) for completion in done for version in completion.versions} == {1}
        assert new_trainer.gap(requests, done) < 0.01 * trainer.gap(requests, done)
    finally:
        engine.update_weights(folders[0], 0)
    back = engine.generate(requests)
    assert trainer.gap(requests, back) < 0.01 * new_trainer.gap(requests, back)
    assert not all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(done, back, strict=True))
