"""The asynchronous loop with a real vLLM: answers resume on new weights with their recorded experts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from router_replay.rl.log.metrics import read_metrics

pytest.importorskip("vllm")
ROOT = pathlib.Path(__file__).parents[3]


def test_vllm_trains_beside_its_rollouts(tmp_path: pathlib.Path) -> None:
    settings = [
        f"output={tmp_path / 'run'}", "loop=async", "engine.kind=vllm", "engine.dtype=float32", "engine.max_length=64",
        "steps=4", "rollout.prompts=3", "rollout.group=4", "asynchronous.max_staleness=2",
        "loss.truncated_importance=2", "logging.tensorboard=false",
    ]  # fmt: skip
    arguments = [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "router_replay.cli", "train", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert b"new weights: by shared memory\n" in done.stdout
    lines = read_metrics(tmp_path / "run")
    assert [line["episodes/trained"] for line in lines] == [12, 24, 36, 48]
    for line in lines:
        assert line["routes/live"] == 0
        assert line["sync/cuda_ipc"] == 0
        assert line["sync/share_of_step"] == line["seconds/sync"] / line["seconds/step"]
        assert line["async/staleness_max"] <= 2
        counts = {name: value for name, value in line.items() if name.startswith("episodes/")}
        assert 2 * counts["episodes/admitted"] == sum(counts.values())
    assert lines[0]["mismatch/k3"] < 1e-3  # nothing was older yet: what is left is arithmetic
    assert max(line["async/staleness_max"] for line in lines) > 0
