"""Record the settings that a run was started with. Every checkpoint has them, and `--resume` compares them.

A different model, different problems or a different seed are refused, because that would be another run in the same
folder. Any other change, including the number of processes, is allowed, shown, and recorded with its first step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from router_replay.errors import TrainError
from router_replay.rl.config import TrainConfig, config_error
from router_replay.rl.environments import Task
from router_replay.rl.policy.models import model_folder
from router_replay.rl.processes.ranks import world_size
from router_replay.rl.state import checkpoints

EDGE = 2**20  # bytes read from each end of a weight file for the fingerprint
WEIGHTS = ("*.safetensors", "*.bin")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Hold the settings of a run: `config`, a fingerprint of `model`, a digest of `problems`, and `processes`.

    `history` lists what each `--resume` changed, and from which step on.
    """

    config: dict[str, Any]
    model: str
    problems: str
    processes: int | None = None  # unknown for older versions
    history: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, config: TrainConfig, task: Task) -> Self:
        """Return the record of a run that starts now with these settings."""
        model = fingerprint(model_folder(config.model.path))
        return cls(config.model_dump(mode="json"), model, task.digest, world_size())

    @classmethod
    def read(cls, saved: Mapping[str, Any], place: pathlib.Path) -> Self:
        """Return the record that `saved`, the JSON of the file `place`, holds; raise TrainError if it is not one."""
        try:
            record = cls(**{**saved, "history": tuple(saved["history"])})
            if not isinstance(record.config, dict):
                raise TypeError("config is not an object")
        except (KeyError, TypeError) as error:
            raise TrainError(
                f"{place} is not the record of a run ({error}): move this checkpoint away to use the one before it"
            ) from error
        return record

    def as_json(self) -> dict[str, Any]:
        """Return the contents of run.json."""
        return dataclasses.asdict(self)

    def for_config_file(self) -> dict[str, Any]:
        """Return the contents of config.json: the current settings, and the history of their changes."""
        return {**self.config, **({"history": list(self.history)} if self.history else {})}

    def going_on_from(self, before: RunRecord, step: int, output: pathlib.Path) -> Self:
        """Return this record with the history of `before`; raise ConfigError if `before` is a different run."""
        if refused := _refusals(before, self):
            way_out = "set them back to continue it, or set another output for a new run"
            raise config_error(f"--resume: {output} holds a run with other settings; {way_out}", refused)
        changes = _changes(before.config, self.config)
        if before.processes not in (None, self.processes):  # not a setting: any number is allowed
            changes["processes"] = [before.processes, self.processes]
        news = ({"step": step, "changes": changes},) if changes else ()
        return dataclasses.replace(self, history=(*before.history, *news))

    def notes(self, step: int) -> list[str]:
        """Return a line for the display for each change that a `--resume` at `step` made."""
        return [
            f"from step {step} on, {name} is {new!r}; it was {old!r}"
            for entry in self.history[-1:]
            if entry["step"] == step
            for name, (old, new) in entry["changes"].items()
        ]


def record_of(
    config: TrainConfig, task: Task, checkpoint: pathlib.Path | None, step: int
) -> tuple[RunRecord, list[str]]:
    """Return the record of a run that starts or resumes from a checkpoint, and notes for its user."""
    now = RunRecord.of(config, task)
    if checkpoint is None:
        return now, []
    saved = checkpoints.read_record(checkpoint)
    if saved is None:
        return now, [f"{checkpoint} has no run.json with the settings that it was made with, so they are not compared"]
    before = RunRecord.read(saved, checkpoint / checkpoints.RECORD)
    record = now.going_on_from(before, step, config.output)
    return record, record.notes(step)


def fingerprint(folder: pathlib.Path) -> str:
    """Return a digest of a model's config and both ends of its weight files, independent of the folder's path."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE))
            file.seek(max(0, size - EDGE))
            digest.update(file.read(EDGE))
    return digest.hexdigest()[:16]


def _refusals(before: RunRecord, now: RunRecord) -> list[str]:
    old, new = flat(before.config), flat(now.config)
    fixed = ["seed", "environment.kind"]
    if new.get("environment.kind") != "jsonl":
        fixed.append("environment.digits")
    refused = [
        f"{name}: the run was started with {old[name]!r}, now it is {new[name]!r}"
        for name in fixed
        if name in old and old[name] != new[name]
    ]
    path, file = "model.path", "environment.file"
    if before.model != now.model:
        refused.append(
            f"{path}: the run was started with {old.get(path)!r} (fingerprint {before.model}), now it is "
            f"{new[path]!r} (fingerprint {now.model})"
        )
    if before.problems != now.problems and not refused:  # otherwise they differ because of the settings named above
        source = file if new.get("environment.kind") == "jsonl" else "environment.arguments"
        refused.append(
            f"{source}: the run was started with {before.problems} from {old.get(source)!r}, now there are "
            f"{now.problems} from {new.get(source)!r}"
        )
    return refused


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the old and new value of every setting that differs. Settings missing from one of the two are left out."""
    old, new = flat(before), flat(now)
    both = [name for name in new if name in old and name != "output"]
    return {name: [old[name], new[name]] for name in both if old[name] != new[name]}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {"optimizer": {"lr": 1}} to {"optimizer.lr": 1}; engine.arguments stays one setting."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and not prefix:
            settings |= flat(value, f"{name}.")
        else:
            settings[prefix + name] = value
    return settings
