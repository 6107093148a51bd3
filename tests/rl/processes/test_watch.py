"""Several processes: what one of them fails of reaches all, and one that hangs is named. Real processes over gloo."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
HEAD = """
import os, sys, time
from router_replay.cli import main
from router_replay.rl.loop import run
from router_replay.rl.policy import policy
from router_replay.rl.state import checkpoints
from router_replay.rl.log.metrics import MetricsWriter
second = os.environ["RANK"] == "1"
"""
TAIL = "\nsys.exit(main())\n"


def command_of(settings: list[str], tmp_path: pathlib.Path, code: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + code + TAIL)
    arguments = [part for setting in settings for part in ("--set", setting)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return [sys.executable, *torchrun, str(script), "train", *arguments]


def run(settings: list[str], tmp_path: pathlib.Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = command_of(settings, tmp_path, code)
    return subprocess.run(command, env=environment, check=False, timeout=600, capture_output=True, text=True)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("router-replay train:")]


RAISES = {
    "loading the model": """
def load(*_):
    raise KeyError("the second rank fell over")
if second:
    run.make_policy = load
""",
    "score": """
def score(*_):
    raise KeyError("the second rank fell over")
if second:
    policy.Policy.score = score
""",
    "update": """
from router_replay.errors import ReplayError
def update(*_):
    raise ReplayError("the second rank fell over")
if second:
    policy.Policy.update = update
""",
}


@pytest.mark.parametrize("phase", RAISES)
def test_what_fails_on_one_rank_is_told_by_all(settings: list[str], tmp_path: pathlib.Path, phase: str) -> None:
    done = run(settings, tmp_path, RAISES[phase])
    assert done.returncode
    lines = said(done)
    assert any(f"rank 1 failed in phase {phase!r}" in line and "the second rank fell over" in line for line in lines)
    assert "gloo" not in "".join(lines)
    assert len(lines) <= 2  # once for each rank


def test_what_fails_on_the_first_rank_alone_is_told_by_all(settings: list[str], tmp_path: pathlib.Path) -> None:
    code = """
def write(*_):
    raise OSError(5, "the disk of the first rank is gone")
MetricsWriter.write = write
"""
    done = run(settings, tmp_path, code)
    assert done.returncode
    assert any("the disk of the first rank is gone" in line for line in said(done))
    assert any("rank 0 failed in phase 'sync'" in line for line in said(done))


def test_a_rank_that_hangs_is_named_with_its_phase_and_place(settings: list[str], tmp_path: pathlib.Path) -> None:
    code = """
def slow(*_):
    time.sleep(600)
if second:
    policy.Policy.score = slow
"""
    done = run([*settings, "trainer.rank_timeout=12"], tmp_path, code)
    assert done.returncode
    [line] = set(said(done))
    assert "no rank made progress for 12 s (trainer.rank_timeout): rank 1 is in phase 'score' at" in line
    assert "in slow" in line
    assert "; rank 0 waits in phase 'score'" in line


@pytest.mark.parametrize(
    ("timeout", "silent", "words"),
    [(12, 45.0, "no rank made progress for 12 s"), (1800, 11.0, "rank 0 waits for it, up to 1800 s without progress")],
    ids=["at the end", "long before"],
)
def test_a_rank_that_is_stopped_is_named(
    settings: list[str], tmp_path: pathlib.Path, timeout: int, silent: float, words: str
) -> None:
    """It cannot say anything itself: the others see that it is silent."""
    mark = tmp_path / "pid"
    code = f"""
import pathlib, signal
from router_replay.rl.processes import watch
watch.SILENT = {silent}
def stop(*_):
    pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
if second:
    policy.Policy.score = stop
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = command_of([*settings, f"trainer.rank_timeout={timeout}"], tmp_path, code)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("router-replay train:"))
    finally:
        os.kill(int(mark.read_text()), signal.SIGKILL)  # a stopped process hears nothing else
        process.communicate()
    assert process.returncode
    assert "rank 1 has not reported for" in line
    assert words in line
    assert "and was last seen in phase" in line


def test_a_rank_that_never_comes_is_named(settings: list[str], tmp_path: pathlib.Path) -> None:
    code = """
if second:
    time.sleep(600)
"""
    done = run([*settings, "trainer.rank_timeout=6"], tmp_path, code)
    assert done.returncode
    assert any("rank 1 never joined the run" in line for line in said(done)), done.stderr
