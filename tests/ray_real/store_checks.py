"""Runs on Ray whose object store is watched, or full: nothing stays in it, and no episode is lost."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from router_replay.rl.rollout.ledger import REASONS
from tests.rl.cluster.command import COMMON, assert_like_a_run_of_one_process, run
from tests.rl.state.test_checkpoints import lines

SMALLEST = 78643200  # that Ray accepts


def test_the_routes_of_a_step_leave_the_store_with_it(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path
) -> None:
    """At its first reward, a step has its 12 trajectories in the store; those of earlier steps have left it."""
    whole, output = tmp_path / "whole", tmp_path / "ray"
    train(make_config(*COMMON, f"output={whole}"))
    run(settings, tmp_path, f"output={output}", "environment.reward=tests.rl.cluster.faults:note_store")
    assert_like_a_run_of_one_process(output, whole)
    used = [int(line) for line in (tmp_path / "store").read_text().split()]
    assert len(used) == 4
    assert used[0] > 12 * 100
    assert max(used) <= 1.3 * used[0]


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_full_store_costs_no_episode(settings: list[str], tmp_path: pathlib.Path, loop: str) -> None:
    output = tmp_path / loop
    full = ["environment.reward=tests.rl.cluster.faults:fill_store", f"cluster.object_store_bytes={SMALLEST}"]
    shared = ["trainer.ulysses=2"] if loop == "sync" else []  # each rank then reads its piece of every sequence
    run(settings, tmp_path, f"output={output}", f"loop={loop}", "loss.truncated_importance=2.0", *full, *shared)
    found = lines(output)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert all(line["routes/live"] == 0 for line in found)
    assert min(int(line) for line in (tmp_path / "free").read_text().split()) < 1 << 20  # it was full
    if loop == "async":
        for line in found:
            ended = line["episodes/trained"] + sum(line[f"episodes/dropped_{why}"] for why in REASONS)
            assert line["episodes/admitted"] == ended + line["episodes/saved"] + line["episodes/playing"]
        assert found[-1]["episodes/trained"] == 4 * 12
