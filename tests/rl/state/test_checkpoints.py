"""A run that is killed and resumed ends with the same weights, and a checkpoint is whole or not there."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from router_replay.rl.state import checkpoints

ROOT = pathlib.Path(__file__).parents[3]
STEPS = 5


def start(settings: list[str], *more: str) -> subprocess.Popen[bytes]:
    arguments = [argument for setting in [*settings, *more] for argument in ("--set", setting)]
    command = [sys.executable, "-m", "router_replay.cli", "train", *arguments, "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
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


def test_a_checkpoint_with_the_moments_in_trainer_pt_is_still_read(
    make_config: Callable[..., TrainConfig], tmp_path: pathlib.Path
) -> None:
    """Older versions wrote the whole optimizer state there."""
    common = ["replay=r3", "steps=2", "checkpoint.every=1"]
    whole, old = tmp_path / "whole", make_config(*common, f"output={tmp_path / 'old'}")
    train(make_config(*common, f"output={whole}"))
    train(old.model_copy(update={"steps": 1}))
    folder = checkpoints.latest(old.output)
    assert folder is not None
    saved = torch.load(folder / checkpoints.TRAINER)
    moments = load_file(folder / checkpoints.MOMENTS_FILE)
    state = {
        name: {"step": step, **{moment: moments[f"{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq")}}
        for name, step in saved["steps"].items()
    }
    torch.save({"optimizer": {"state": state, "param_groups": []}, "random": saved["random"]}, folder / "trainer.pt")
    (folder / checkpoints.MOMENTS_FILE).unlink()
    train(old, resume=True)
    expected, got = final_weights(whole), final_weights(old.output)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


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
    with pytest.raises(ConfigError, match=r"already holds a run .*pass --resume to continue it, or set another output"):
        train(config)
    assert train(config, resume=True).step == 1  # nothing is left to do


def test_what_is_no_checkpoint_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TrainError, match=r"progress\.json cannot be read: the checkpoint is damaged"):
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


# -- which folders are checkpoints -----------------------------------------------------------------------


def test_checkpoints_are_known_by_their_exact_name_and_sorted_by_number(tmp_path: pathlib.Path) -> None:
    steps = [3, 999_999, 1_000_000]
    others = ["step_000003_before_lr_change", "step_9", "step_", "step_00000a", "step_0000012", "a_step_000004"]
    for name in [*(f"step_{step:06}" for step in steps), *others]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_2000000").touch()  # a file is no checkpoint
    assert [path.name for path in checkpoints.found(tmp_path)] == ["step_000003", "step_999999", "step_1000000"]
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoints" / "step_1000000"


def test_a_users_copy_is_neither_resumed_nor_pruned_nor_counted(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("steps=2", "replay=off", "checkpoint.every=1", "checkpoint.keep=1")
    train(config)
    folder = config.output / "checkpoints"
    copies = [folder / "step_000002_before_lr_change", folder / "step_000000"]
    for copy in copies:  # the second one has our name, but its progress file is that of another step
        shutil.copytree(folder / "step_000002", copy)
    assert checkpoints.latest(config.output) == folder / "step_000002"
    train(config.model_copy(update={"steps": 3}), resume=True)
    assert {path.name for path in folder.iterdir()} == {*(copy.name for copy in copies), "step_000003"}


# -- a full disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[Callable[[int], pathlib.Path]]:
    mounted = []

    def make(size: int) -> pathlib.Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def kilobytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*")) // 1024


def test_a_full_disk_is_one_message_and_the_last_checkpoint_stays(
    make_config: Callable[..., TrainConfig], settings: list[str], small_disk: Callable[[int], pathlib.Path]
) -> None:
    config = make_config("steps=1", "replay=off", "checkpoint.every=1")
    train(config)
    one = kilobytes(config.output)
    disk = small_disk(one * 3 // 2)
    common = ["steps=3", "replay=off", "checkpoint.every=1", f"output={disk / 'run'}"]
    process = start(settings, *common)
    assert process.stderr is not None
    error = process.stderr.read().decode()
    assert process.wait() == 1
    lines = [line for line in error.splitlines() if line.startswith("router-replay train:")]
    assert len(lines) == 1
    assert "Traceback" not in error
    folder = disk / "run" / "checkpoints"
    assert f"the checkpoint {folder / 'step_000002'} could not be written" in lines[0]
    assert "It needs about" in lines[0]
    assert f"the last complete checkpoint is {folder / 'step_000001'}" in lines[0]
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    subprocess.run(["mount", "-o", f"remount,size={one * 4}k", str(disk)], check=True)
    last = start(settings, *common)
    assert last.wait() == 0, last.stderr and last.stderr.read().decode()


@pytest.mark.parametrize("write", ["weights", "tokenizer", "trainer", "progress", "sync", "rename"])
def test_no_write_that_fails_leaves_half_a_checkpoint(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """Quotas and network disks say that they are full only when they are written to."""
    config = make_config("steps=2", "replay=off", "checkpoint.every=1")
    train(config.model_copy(update={"steps": 1}))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    target = {
        "weights": "transformers.PreTrainedModel.save_pretrained",
        "tokenizer": "transformers.PreTrainedTokenizerBase.save_pretrained",
        "trainer": "torch.save",
        "progress": "pathlib.Path.write_text",
        "sync": "os.fsync",
        "rename": "pathlib.Path.rename",
    }[write]
    real = checkpoints.save

    def save(*arguments: object, **more: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, full)
            real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "save", save)
    with pytest.raises(checkpoints.CheckpointError, match=r"step_000002 could not be written: .*No space left") as told:
        train(config, resume=True)
    assert str(told.value).count("could not be written") == 1
    folder = config.output / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    monkeypatch.undo()
    assert train(config, resume=True).step == 2


def test_a_full_disk_while_a_failure_is_being_saved_hides_neither(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", save)
    monkeypatch.setattr("router_replay.rl.rollout.episodes._write_episodes", save)
    with pytest.raises(TrainError) as raised:
        train(make_config("environment.reward=tests.rl.rewards:breaks"))
    message = str(raised.value)
    assert "the grader fell over" in message
    assert "the state could not be saved" in message
    assert "No space left" in message
