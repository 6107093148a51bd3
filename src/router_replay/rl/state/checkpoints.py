"""Write and read checkpoints.

A checkpoint is written beside its final place, synced to disk and then renamed, so a killed run leaves no partial one.

    out/run/checkpoints/step_000010/
        model.safetensors, config.json, tokenizer...    the float32 policy in the Hugging Face layout
        optimizer.safetensors                           the optimizer's moments: "exp_avg." and the weight's name, ...
        trainer.pt                                      the optimizer's steps, random numbers
        run.json                                        the settings of the run so far (run_record.py)
        progress.json                                   steps done, policy version, next problem, optimizer steps

Weights and optimizer state are stored whole, not as the shards of a rank, so any number of processes can resume. The
first rank writes each tensor when it has been gathered, and every rank reads its own shard, so no rank holds the whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from router_replay.engines.lazy_tensors import LazyTensors
from router_replay.errors import TrainError
from router_replay.rl.policy.base import MOMENTS, BasePolicy
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.weights.files import TensorFile, open_parts, write_folder
from router_replay.rl.weights.lending import Lent, lending

FOLDER = "checkpoints"
TRAINER, MOMENTS_FILE, PROGRESS, RECORD = "trainer.pt", "optimizer.safetensors", "progress.json", "run.json"
UNFINISHED = (".writing_", ".replaced_")  # what a kill during `save` leaves


class CheckpointError(TrainError):
    """A checkpoint could not be written. Every rank raises it; a second try would fail again."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Hold how far a run is: `step` steps and `updates` optimizer steps are done.

    `version` is the policy version of the engine. The next step starts at problem number `problem`. `rollouts` is the
    state of the asynchronous loop's rollouts as JSON (`rollout/ledger.py`), None for the synchronous loop.
    """

    step: int = 0
    version: int = 0
    problem: int = 0
    updates: int = 0
    rollouts: dict[str, Any] | None = None


def found(output: pathlib.Path) -> list[pathlib.Path]:
    """Return every checkpoint folder, sorted by step. A name with a suffix after the number is a user's own copy."""
    folder = output / FOLDER
    named = [(re.fullmatch(r"step_(\d{6,})", path.name), path) for path in folder.glob("step_*") if path.is_dir()]
    numbered = [(int(match[1]), path) for match, path in named if match is not None]
    return [path for step, path in sorted(numbered) if path.name == _name(step)]


def latest(output: pathlib.Path) -> pathlib.Path | None:
    """Return the newest complete checkpoint, or None. A folder gets its final name only when it is fully on disk."""
    return next(reversed(found(output)), None)


def save(
    policy: BasePolicy,
    progress: Progress,
    tokenizer: Any,
    output: pathlib.Path,
    keep: int,
    ranks: Ranks,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint and remove the oldest ones beyond `keep`. All ranks call this; the first one writes."""
    failure = None
    with lending(policy, ranks) as lent:  # the other ranks wait here until the checkpoint is written
        if lent is not None:
            final = output / FOLDER / _name(progress.step)
            side = final.with_name(f".writing_{final.name}")
            needed = sum(map(_bytes_of, (lent.weights, *lent.moments.values())))
            try:
                _make_room(final.parent, needed)
                _write(side, policy.model, lent, tokenizer)
                if record is not None:
                    (side / RECORD).write_text(json.dumps(record, indent=2))
                fields = {name: value for name, value in dataclasses.asdict(progress).items() if value is not None}
                (side / PROGRESS).write_text(json.dumps(fields))
                _to_disk(side)
                _put_in_place(side, final)
            except Exception as error:  # torch, transformers and the system report a full disk with different types
                shutil.rmtree(side, ignore_errors=True)
                failure = _not_written(final, needed, error)
            else:
                _prune(output, keep)
    if ranks.any(failure is not None):
        raise failure or CheckpointError(f"the first rank could not write the checkpoint of step {progress.step}")


def _write(folder: pathlib.Path, model: Any, lent: Lent, tokenizer: Any) -> None:
    """Write the weights, the tokenizer, the optimizer's state and the random numbers."""
    write_folder(model, lent.weights, folder)
    tokenizer.save_pretrained(folder)
    steps = {name: step.cpu() for name, step in lent.steps.items()}
    torch.save({"steps": steps, "random": torch.get_rng_state()}, folder / TRAINER)
    moments = {_in_file(moment, name): like for moment in MOMENTS for name, like in lent.moments[moment].like.items()}
    with TensorFile(folder / MOMENTS_FILE, moments) as file:
        for moment in MOMENTS:
            for name in lent.moments[moment]:
                file.write(_in_file(moment, name), lent.moments[moment][name])


def _in_file(moment: str, name: str) -> str:
    return f"{moment}.{name}"


def read_progress(folder: pathlib.Path) -> Progress:
    """Return the progress of a checkpoint; raise TrainError if its file is damaged."""
    try:
        fields = json.loads((folder / PROGRESS).read_text())
        progress = Progress(**fields)
        numbers = {name: value for name, value in fields.items() if name != "rollouts"}
        if not all(type(value) is int and value >= 0 for value in numbers.values()):
            raise ValueError(f"expected whole numbers of 0 or more, got {numbers}")
        if re.fullmatch(r"step_\d+", folder.name) and folder.name != _name(progress.step):
            raise ValueError(f"it says step {progress.step}, but the folder has the name {folder.name}")
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise damaged(folder, PROGRESS, error) from error
    return progress


def read_record(folder: pathlib.Path) -> dict[str, Any] | None:
    """Return the settings that the checkpoint was made with, or None if it has no run.json (older versions)."""
    try:
        record = json.loads((folder / RECORD).read_text())
        if not isinstance(record, dict):
            raise ValueError(f"expected an object, got {record!r:.80}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, RECORD, error) from error
    return record


def restore(policy: BasePolicy, folder: pathlib.Path) -> None:
    """Load optimizer state and random numbers of a checkpoint into a policy that was loaded from the same folder.

    Every rank reads its share of the optimizer's state. The settings of the optimizer are those of the run. Raise
    TrainError if a file is damaged.
    """
    try:
        # Runs no code from the file, and reads its tensors when they are used.
        saved = torch.load(folder / TRAINER, map_location="cpu", weights_only=True, mmap=True)
        state = _moments(folder, saved["steps"]) if "steps" in saved else (saved["optimizer"] or {}).get("state", {})
        random = saved["random"].clone()
    except Exception as error:  # a damaged file fails in torch, pickle or zipfile, each with its own error
        raise (error if isinstance(error, TrainError) else damaged(folder, TRAINER, error)) from error
    try:
        policy.load_optimizer_state(state)
    except Exception as error:
        raise damaged(folder, MOMENTS_FILE if "steps" in saved else TRAINER, error) from error
    torch.set_rng_state(random)
    policy.updates = read_progress(folder).updates


def _moments(folder: pathlib.Path, steps: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return the steps and the moments of each weight; the moments are read when they are used, part by part."""
    try:
        moments = open_parts(folder / MOMENTS_FILE)
        return {
            name: {"step": step, **{moment: moments[_in_file(moment, name)] for moment in MOMENTS}}
            for name, step in steps.items()
        }
    except Exception as error:
        raise damaged(folder, MOMENTS_FILE, error) from error


def damaged(folder: pathlib.Path, file: str, error: Exception) -> TrainError:
    """Return the error for a checkpoint that cannot be read; it names the previous checkpoint."""
    others = [path for path in found(folder.parent.parent) if path != folder]
    remedy = "this run has no other checkpoint: start a new run with another output"
    if others:
        remedy = f"move the folder away and pass --resume again to continue from {others[-1]}"
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return TrainError(f"{folder / file} cannot be read: the checkpoint is damaged ({reason}); {remedy}")


def _name(step: int) -> str:
    return f"step_{step:06}"


def _bytes_of(tensors: LazyTensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.like.values())


def _make_room(parent: pathlib.Path, needed: int) -> None:
    """Remove the partial files of a killed run, and check the free disk space before anything is written."""
    parent.mkdir(parents=True, exist_ok=True)
    for prefix in UNFINISHED:
        for left in parent.glob(f"{prefix}step_*"):
            shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(parent).free < needed:
        raise OSError("the disk has not enough free space")


def _put_in_place(side: pathlib.Path, final: pathlib.Path) -> None:
    """Rename the new checkpoint into place. An old one of the same step is removed only after that.

    An old one exists when a step failed twice.
    """
    replaced = final.with_name(f".replaced_{final.name}")
    if final.exists():
        final.rename(replaced)
    side.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(output: pathlib.Path, keep: int) -> None:
    """Remove the oldest checkpoints. Only folders with a progress file, which this module wrote, are removed."""
    for old in [path for path in found(output) if _is_ours(path)][:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _is_ours(path: pathlib.Path) -> bool:
    try:
        read_progress(path)
    except TrainError:
        return False
    return not path.is_symlink()


def _not_written(final: pathlib.Path, needed: int, error: Exception) -> CheckpointError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    try:
        room = f"the disk has {_size(shutil.disk_usage(final.parent).free)} free"
    except OSError:
        room = "the free space of the disk is unknown"
    whole = latest(final.parent.parent)
    last = f"the last complete checkpoint is {whole}" if whole else "there is no complete checkpoint"
    return CheckpointError(
        f"the checkpoint {final} could not be written: {reason}. It needs about {_size(needed)}, and {room}. The "
        f"unfinished checkpoint was removed, and {last}: free some space, then continue with --resume"
    )


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _to_disk(folder: pathlib.Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
