"""Runs on Ray with environments in two processes, one of which is killed in the middle of its episodes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from router_replay.rl.rollout.ledger import REASONS
from tests.rl.cluster.command import COMMON, assert_like_a_run_of_one_process, run
from tests.rl.state.test_checkpoints import lines

IN_PROCESSES = ["cluster.environments=2", "environment.file=", "environment.reward="]


def processes(faults: pathlib.Path) -> set[str]:
    return set((faults / "processes").read_text().split())


def test_episodes_of_a_process_that_dies_are_played_on_in_another(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path
) -> None:
    """The weights are those of a run in which the environments are in the trainer's process, and none dies."""
    game = ["environment.kind=tests.rl.cluster.games:Steady", "environment.file=", "environment.reward="]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(make_config(*COMMON, *game, "environment.arguments={kills = false}", f"output={whole}"))
    said = run(settings, tmp_path, f"output={killed}", *game, *IN_PROCESSES)
    assert_like_a_run_of_one_process(killed, whole)
    assert len(processes(tmp_path)) == 3
    assert all(line["turns"] == 3 for line in lines(killed))
    assert "died at problem" in said


def test_episodes_that_cannot_be_played_on_are_dropped_and_counted(settings: list[str], tmp_path: pathlib.Path) -> None:
    output = tmp_path / "async"
    asynchronous = ["loop=async", "loss.truncated_importance=2.0", "environment.kind=tests.rl.cluster.games:Moody"]
    said = run(settings, tmp_path, f"output={output}", *IN_PROCESSES, *asynchronous)
    found = lines(output)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    for line in found:
        ended = line["episodes/trained"] + sum(line[f"episodes/dropped_{why}"] for why in REASONS)
        assert line["episodes/admitted"] == ended + line["episodes/saved"] + line["episodes/playing"]
    assert found[-1]["episodes/dropped_environment"] >= 4  # a group at least
    assert found[-1]["episodes/trained"] == 4 * 12
    assert "it then answered turn" in said
    assert "its group is dropped" in said
