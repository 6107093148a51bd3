"""examples/trl_grpo.py as a user runs it, with vLLM: R3 closes most of the gap, and the reward is the same."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 3


def run(replay: str, output: pathlib.Path) -> list[dict[str, float]]:
    arguments = ["--replay", replay, "--steps", str(STEPS), "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "examples/trl_grpo.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("mismatch/k3")]
    return [{name: float(value) for name, value in re.findall(r"(\S+) (\S+)", line)} for line in lines]


def test_the_example_shows_what_replay_is_for(tmp_path: pathlib.Path) -> None:
    off, r3 = run("off", tmp_path / "off"), run("r3", tmp_path / "r3")
    assert len(off) == len(r3) == STEPS
    assert sum(one["mismatch/k3"] for one in r3) <= sum(one["mismatch/k3"] for one in off) / 3
    assert all(one["routes/replayed"] > 0 and one["routes/live"] == 0 for one in r3)
    assert all(one["routes/replayed"] == 0 and one["routes/live"] > 0 for one in off)
    # 512 rewards of 0 or 1 in each step: a standard error of about 0.02, and the first step has the same samples
    assert r3[0]["reward"] == pytest.approx(off[0]["reward"], abs=0.03)
    rewards = [sum(one["reward"] for one in entries) / STEPS for entries in (off, r3)]
    assert rewards[1] == pytest.approx(rewards[0], abs=0.1)
