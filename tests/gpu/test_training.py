"""Test one training step in mode R3 on the device, from rollouts to new weights."""

from __future__ import annotations

import math
import pathlib

from router_replay.rl.config import load_config
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.loop.train import train


def test_a_step_with_r3_replays_every_row_and_learns(tmp_path: pathlib.Path, device: str) -> None:
    """The tiny model in bfloat16. The embedded engine computes in the trainer's process, on the same device."""
    settings = [
        f"output={tmp_path}", "replay=r3", "steps=2", "model.path=tiny", "model.dtype=bfloat16",
        "engine.kind=embedded", "engine.dtype=bfloat16", "engine.max_length=64", "environment.kind=arithmetic",
        "rollout.prompts=16", "rollout.group=8", "rollout.max_tokens=8", "optimizer.lr=5e-5",
        "optimizer.mini_batches=2", "trainer.max_tokens=2048", "checkpoint.every=0", "logging.tensorboard=false",
    ]  # fmt: skip
    train(load_config(None, settings))
    lines = read_metrics(tmp_path)
    assert len(lines) == 2
    for number, line in enumerate(lines, 1):
        assert line["routes/live"] == 0
        assert line["routes/replayed"] > 0
        assert line["mismatch/k3"] < 1e-3
        assert math.isfinite(line["grad_norm"])
        assert line["grad_norm"] > 0
        assert line["version"] == number
