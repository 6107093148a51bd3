"""A run that is killed and resumed ends with the same weights, and a checkpoint is whole or not there."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from router_replay.errors import ConfigError, TrainError
from router_replay.rl import checkpoints
from router_replay.rl.config import TrainConfig
from router_replay.rl.sync_loop import train

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 5


def start(settings: list[str], *more: str) -> subprocess.Popen[bytes]:
    arguments = [argument for setting in [*settings, *more] for argument in ("--set", setting)]
    command = [sys.executable, "-m", "router_replay.cli", "train", *arguments, "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_when(process: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()[-2000:]
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def final_weights(output: pathlib.Path) -> dict[str, torch.Tensor]:
    folder = checkpoints.latest(output)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def lines(output: pathlib.Path) -> list[dict[str, float]]:
    file = output / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_kill_minus_nine_at_any_moment_changes_nothing_in_the_end(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path
) -> None:
    common = ["replay=r3", f"steps={STEPS}", "checkpoint.every=1", "optimizer.warmup_steps=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(make_config(*common, f"output={whole}"))
    # While a checkpoint is being written, while a step is under way, and right after a checkpoint.
    writing, written = cut / "checkpoints" / ".writing_step_000002", cut / "checkpoints" / "step_000002"
    kill_when(start(settings, *common, f"output={cut}"), lambda: writing.exists() or written.exists())
    left = checkpoints.latest(cut)
    assert left is not None
    assert checkpoints.read_progress(left).step == int(left.name[-1])
    kill_when(start(settings, *common, f"output={cut}"), lambda: len(lines(cut)) == 3)
    fourth = cut / "checkpoints" / "step_000004"
    kill_when(start(settings, *common, f"output={cut}"), fourth.exists)
    last = start(settings, *common, f"output={cut}")
    assert last.wait() == 0, last.stderr and last.stderr.read().decode()
    expected, got = final_weights(whole), final_weights(cut)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert [line["step"] for line in lines(cut)] == list(range(STEPS))
    for a, b in zip(lines(whole), lines(cut), strict=True):
        for name in ("reward", "loss", "mismatch/k3", "grad_norm", "lr", "version"):
            assert a[name] == b[name], (a["step"], name)


def test_a_checkpoint_is_a_hugging_face_folder(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("steps=3", "checkpoint.every=1", "checkpoint.keep=2", "replay=off")
    progress = train(config)
    assert progress == checkpoints.Progress(step=3, version=3, problem=9, updates=6)
    kept = sorted(path.name for path in (config.output / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000003"]
    folder = checkpoints.latest(config.output)
    assert folder is not None
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).encode("1+1=")
    assert checkpoints.read_progress(folder) == progress


def test_a_run_is_not_written_over(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("steps=1", "replay=off")
    train(config)
    with pytest.raises(ConfigError, match=r"holds a run already .*pass --resume to go on, or set another output"):
        train(config)
    assert train(config, resume=True).step == 1  # nothing is left to do


def test_what_is_no_checkpoint_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TrainError, match=r"progress\.json cannot be read, the checkpoint is damaged"):
        checkpoints.read_progress(tmp_path)


def test_a_checkpoint_that_was_cut_off_is_not_taken(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("steps=1", "replay=off")
    train(config)
    folder = checkpoints.latest(config.output)
    assert folder is not None
    (folder.with_name(".writing_step_000002")).mkdir()  # what a kill in the middle leaves
    assert checkpoints.latest(config.output) == folder
    again = config.model_copy(update={"steps": 2})
    assert train(again, resume=True).step == 2  # and it is in nobody's way
    assert not (folder.with_name(".writing_step_000002")).exists()
