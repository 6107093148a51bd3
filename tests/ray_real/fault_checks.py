"""A run on Ray whose trainer rank or driver is killed in the middle. Real processes; `make test-ray` runs this."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import time
from collections.abc import Callable

import pytest

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from tests.rl.cluster.command import COMMON, assert_like_a_run_of_one_process, command, engines_seen, environment, run
from tests.rl.state.test_checkpoints import lines


@pytest.mark.parametrize("victim", ["first", "other"])
def test_ranks_start_again_from_the_checkpoint_and_the_engines_stay(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path, victim: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(make_config(*COMMON, f"output={whole}"))
    said = run(settings, tmp_path, f"output={killed}", f"environment.reward=tests.rl.cluster.faults:kill_{victim}_rank")
    assert_like_a_run_of_one_process(killed, whole)
    rank = {"first": 0, "other": 1}[victim]
    assert re.search(rf"the process of .*rank {rank} \(process \d+ on .*start again .*restart 1 of 3", said)
    assert len(set(engines_seen(tmp_path))) == 1


def test_a_run_whose_driver_was_killed_is_resumed(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path
) -> None:
    """Ray ends its actors with the driver, so that the next run finds the output free."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(make_config(*COMMON, f"output={whole}"))
    driver = subprocess.Popen(command(settings, f"output={killed}"), env=environment(tmp_path))
    try:
        until(lambda: (killed / "metrics.jsonl").exists() and len(lines(killed)) >= 1)
    finally:
        driver.kill()
        driver.wait()
    holder = json.loads((killed / "run.lock").read_text())["pid"]
    until(lambda: not pathlib.Path(f"/proc/{holder}").exists())
    run(settings, tmp_path, f"output={killed}", resume=True)
    assert_like_a_run_of_one_process(killed, whole)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
