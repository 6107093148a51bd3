"""A run on Ray with two trainer ranks and two engines, one of which is killed in the middle. Real processes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from tests.rl.cluster.command import COMMON, assert_like_a_run_of_one_process, engines_seen, run

pytest.importorskip("ray")


def test_an_engine_that_dies_loses_no_episode(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(make_config(*COMMON, f"output={whole}"))
    said = run(settings, tmp_path, f"output={killed}", "environment.reward=tests.rl.cluster.faults:kill_engine")
    assert_like_a_run_of_one_process(killed, whole)
    assert "engine engine0 does not answer and gets no more requests" in said
    assert len(set(engines_seen(tmp_path))) == 2  # it has another process later
