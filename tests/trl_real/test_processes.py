"""Two processes over gloo share one engine, and each replays the rows of its own sequences."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_two_processes_train_with_one_engine(folder: str, tmp_path: pathlib.Path, replay: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.trl_real.two_processes", folder, str(tmp_path), replay],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    about = json.loads(line.removeprefix("RESULT "))
    assert about["engines"] == [True, False]
    assert about["pushes"] == 2  # two rollouts
    assert all(gap < 1e-5 for gap in about["gaps"])
    assert about["sequences"][0] != about["sequences"][1]
    assert about["weights"][0] == about["weights"][1]
    assert all(rows > 0 for rows in about["replayed"])
    first = about["log"][0]
    assert all(entry["routes/live"] == 0 and entry["routes/replayed"] > 0 for entry in about["log"])
    if replay == "r3":
        assert first["routes/old_replayed"] == about["rows"]  # those of both processes
    else:
        assert first["routes/old_live"] == about["rows"]
    assert first["mismatch/k3"] > 0
    assert first["routing/load/layers"] == pytest.approx(about["load"], rel=1e-3)  # of both processes
