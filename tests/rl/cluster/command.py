"""`router-replay train` with cluster.kind = "ray", as a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.rl.state.test_checkpoints import final_weights, lines

ROOT = pathlib.Path(__file__).parents[3]
# Adam divides by the size of a gradient: rounding in one that is nearly zero must not decide a step.
COMMON = ["optimizer.lr=1e-4", "optimizer.warmup_steps=3", "steps=4", "checkpoint.every=1"]
ON_RAY = ["cluster.kind=ray", "cluster.ranks=2", "engine.count=2"]


def command(settings: list[str], *more: str, resume: bool = False) -> list[str]:
    arguments = [part for setting in [*settings, *COMMON, *ON_RAY, *more] for part in ("--set", setting)]
    return [sys.executable, "-m", "router_replay.cli", "train", *(["--resume"] if resume else []), *arguments]


def environment(faults: pathlib.Path) -> dict[str, str]:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FAULTS": str(faults)}


def run(settings: list[str], faults: pathlib.Path, *more: str, resume: bool = False) -> str:
    """Run to the end, and return what it wrote."""
    done = subprocess.run(
        command(settings, *more, resume=resume), env=environment(faults), text=True, timeout=900,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def assert_like_a_run_of_one_process(output: pathlib.Path, whole: pathlib.Path) -> None:
    """Only rounding depends on which requests and which sequences share a pass."""
    assert [line["step"] for line in lines(output)] == [0, 1, 2, 3]
    assert [line["reward"] for line in lines(output)] == [line["reward"] for line in lines(whole)]
    assert all(line["routes/live"] == 0 for line in lines(output))
    expected, got = final_weights(whole), final_weights(output)
    assert max(float((expected[name] - got[name]).abs().max()) for name in expected) < 2e-5


def engines_seen(faults: pathlib.Path) -> list[str]:
    return (faults / "engines").read_text().splitlines()
