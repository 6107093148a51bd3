"""Checkpoints that a run can be killed in the middle of: written to the side, made durable, then renamed.

out/run/checkpoints/step_000010/
    model.safetensors, config.json, tokenizer...    the float32 policy in the Hugging Face layout
    trainer.pt                                      optimizer, random numbers
    progress.json                                   steps done, policy version, next problem, optimizer steps
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from router_replay.errors import TrainError
from router_replay.rl.models import WHOLE_ON_CPU, whole_state
from router_replay.rl.policy import Policy
from router_replay.rl.ranks import Ranks

FOLDER = "checkpoints"
TRAINER, PROGRESS = "trainer.pt", "progress.json"


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is. `step` steps are done; the next one starts at problem number `problem`."""

    step: int = 0
    version: int = 0
    problem: int = 0
    updates: int = 0


def latest(output: pathlib.Path) -> pathlib.Path | None:
    """The newest whole checkpoint: a folder has its final name only when everything in it is on the disk."""
    found = sorted((output / FOLDER).glob("step_*"))
    return found[-1] if found else None


def save(policy: Policy, progress: Progress, tokenizer: Any, output: pathlib.Path, keep: int, ranks: Ranks) -> None:
    """Write a checkpoint and forget the oldest ones. All ranks call this; the first writes."""
    weights = whole_state(policy.model)
    optimizer = None
    if policy.updates:  # torch would make the state of a fresh optimizer by a step, which then counts as one
        optimizer = get_optimizer_state_dict(policy.model, policy.optimizer, options=WHOLE_ON_CPU)
    if ranks.is_first:
        final = output / FOLDER / f"step_{progress.step:06}"
        side = final.with_name(f".writing_{final.name}")
        shutil.rmtree(side, ignore_errors=True)
        policy.model.save_pretrained(side, state_dict=weights)
        tokenizer.save_pretrained(side)
        torch.save({"optimizer": optimizer, "random": torch.get_rng_state()}, side / TRAINER)
        (side / PROGRESS).write_text(json.dumps(dataclasses.asdict(progress)))
        _to_disk(side)
        shutil.rmtree(final, ignore_errors=True)
        side.rename(final)
        _sync(final.parent)
        for old in sorted(final.parent.glob("step_*"))[:-keep]:
            shutil.rmtree(old)
    ranks.any(False)  # nobody goes on, and perhaps dies, before it is written


def read_progress(folder: pathlib.Path) -> Progress:
    try:
        return Progress(**json.loads((folder / PROGRESS).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise TrainError(f"{folder} is no checkpoint of router-replay train: {error}") from error


def restore(policy: Policy, folder: pathlib.Path) -> None:
    """Optimizer and random numbers of a checkpoint; the policy was loaded from the folder itself."""
    saved = torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    if saved["optimizer"] is not None:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(policy.model, policy.optimizer, saved["optimizer"], options=options)
    torch.set_rng_state(saved["random"])
    policy.updates = read_progress(folder).updates


def _to_disk(folder: pathlib.Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
