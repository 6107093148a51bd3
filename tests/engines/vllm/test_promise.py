"""The promise whole: abort, other weights, resume with the recorded rows; trainer and engine agree as ever.

pytest tests/engines/test_vllm_promise.py        prints the table of docs/forced_routing.md
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from router_replay import Trajectory
from router_replay.engines import Engine, Request, Sampling
from tests.engines.conftest import LONG, PROMPT_TOKENS, Checkpoints, midway, not_aborted, prompt

ROLLOUTS = 6
SAMPLING = Sampling(max_tokens=60, ignore_eos=True)


def test_an_aborted_rollout_resumes_with_its_recorded_rows(
    engine: Engine, checkpoints: Checkpoints, trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = [Request(prompt(seed), LONG) for seed in range(ROLLOUTS)]
    first = [completion for [completion] in asyncio.run(midway(engine, rollouts, engine.abort, too_late=not_aborted))]
    assert all(completion.finish_reason == "abort" for completion in first)
    engine.update_weights(checkpoints.b, 1)

    gaps: dict[str, list[np.ndarray]] = {"uninterrupted": [], "resumed, forced": [], "resumed, not forced": []}
    for seed, whole in enumerate(engine.generate([Request(prompt(seed), SAMPLING) for seed in range(ROLLOUTS)])):
        gaps["uninterrupted"].append(trainer.gap(checkpoints.b, prompt(seed), whole, whole.routes))

    for forced in (True, False):
        requests, trajectories = [], []
        for seed, completion in enumerate(first):
            trajectory = Trajectory(engine.spec)
            trajectory.append(prompt(seed), completion.token_ids, completion.logprobs, completion.routes)
            recorded = trajectory.routes[: trajectory.next_start]
            rows = recorded if forced else None
            start = 0 if forced else trajectory.next_start
            requests.append(Request(trajectory.token_ids, Sampling(30, ignore_eos=True), start, rows))
            trajectories.append(trajectory)
        for trajectory, old, request, new in zip(trajectories, first, requests, engine.generate(requests), strict=True):
            recorded = PROMPT_TOKENS + len(old.token_ids) - 1
            if forced:
                assert new.routes[:recorded].same_sets(old.routes)
                assert set(new.routes[:recorded].versions) == {0}
                assert set(new.routes[recorded:].versions) == {1}
            trajectory.append(request.token_ids, new.token_ids, new.logprobs, new.routes, new.start)
            assert trajectory.routes[:recorded].same_sets(old.routes)  # first capture wins
            name = "resumed, forced" if forced else "resumed, not forced"
            gaps[name].append(trainer.gap(checkpoints.b, request.token_ids, new, trajectory.routes[:-1]))

    lines = [f"{type(engine).__name__}: |log-prob of the trainer - log-prob of the engine|, weights B, routes replayed"]
    for name, values in gaps.items():
        joined = np.concatenate(values)
        lines.append(f"  {name:20} mean {joined.mean():.2e}  max {joined.max():.2e}  ({len(joined)} tokens)")
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    mean = {name: float(np.concatenate(values).mean()) for name, values in gaps.items()}
    assert mean["uninterrupted"] < 1e-5
    assert mean["resumed, forced"] < 2 * mean["uninterrupted"]
    assert mean["resumed, not forced"] > 100 * mean["resumed, forced"]
