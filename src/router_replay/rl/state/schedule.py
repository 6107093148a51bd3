"""Write the order of events of an asynchronous run to a file, and read it back.

    schedule/step_000000.jsonl               # one file per process, named after the step that it started from
    {"schedule": 1, "step": 0, "version": 0, "settings": {...}}
    {"do": "start", "admit": [0, 1, 2]}
    {"do": "submit", "request": "0.0.0.0", "version": 0}

The first line is the head. Every other line is an event; the line after the head is event 0. `docs/async.md` explains
the events. A last line without a line end was cut off by a kill and is ignored.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, TextIO

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.state.run_record import flat

FOLDER = "schedule"
FORMAT = 1
Event = dict[str, Any]
ANYWAY = frozenset({"output", "steps", "cluster", "checkpoint", "logging"})
"""Settings that do not change the events up to the end of the shorter run."""


def path_in(output: pathlib.Path, step: int) -> pathlib.Path:
    """Return the file of a process that starts at `step` of the run in the folder `output`."""
    return output / FOLDER / f"step_{step:06}.jsonl"


def head_of(config: TrainConfig, step: int, version: int) -> Event:
    """Return the first line of a schedule: what must be the same in a run that follows it."""
    settings = config.model_dump(mode="json", exclude=set(ANYWAY))
    del settings["asynchronous"]["schedule"]
    return {"schedule": FORMAT, "step": step, "version": version, "settings": flat(settings)}


class ScheduleWriter:
    """Write the schedule of one process. Files of earlier processes that started at a later step are removed."""

    def __init__(self, output: pathlib.Path, head: Event) -> None:
        self._path = path_in(output, head["step"])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for later in self._path.parent.glob("step_*.jsonl"):
                if later.name > self._path.name:
                    later.unlink()
            self._file: TextIO | None = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise TrainError(f"{self._path} could not be written: {error.strerror or error}") from error
        self.add(head)

    def add(self, event: Event, *, flush: bool = False) -> None:
        """Append a line; `flush` hands all lines so far to the operating system."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
            if flush:
                self._file.flush()
        except OSError as error:
            raise TrainError(f"{self._path}: an event could not be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; later events are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_schedule(path: pathlib.Path, head: Event) -> list[Event]:
    """Return the events of a schedule.

    Raises ConfigError if the file is none, or was written by a run with another `head` than this one.
    """
    try:
        *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"asynchronous.schedule = {str(path)!r} cannot be read: {reason}") from error
    parsed = [_parsed(path, number, line) for number, line in enumerate(lines, start=-1)]
    found = parsed[0] if parsed else {}
    if found.get("schedule") != FORMAT:
        raise ConfigError(
            f"{path} is not a schedule of format {FORMAT}: give a file schedule/step_*.jsonl of an asynchronous run"
        )
    _refuse_other_run(path, found, head)
    for number, event in enumerate(parsed[1:]):
        if not isinstance(event.get("do"), str):
            raise ConfigError(f'{path}, event {number} (line {number + 2}): "do" is missing; the file is damaged')
    return parsed[1:]


def _parsed(path: pathlib.Path, number: int, line: str) -> Event:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, event {number} (line {number + 2}) is not JSON ({error}); the file is damaged"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, event {number} (line {number + 2}): expected an object, got {line:.80}")
    return value


def _refuse_other_run(path: pathlib.Path, found: Event, head: Event) -> None:
    for name in ("step", "version"):
        if found.get(name) != head[name]:
            raise ConfigError(
                f"{path} was written by a process that started at {name} {found.get(name)}, and this one starts at "
                f"{head[name]}: use the schedule of a process that started from the same checkpoint"
            )
    old: Mapping[str, Any] = found.get("settings") or {}
    new: Mapping[str, Any] = head["settings"]
    differ = [
        f"{name} = {old.get(name)!r} there and {new.get(name)!r} here"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if differ:
        raise ConfigError(f"{path} is the schedule of a run with other settings: {'; '.join(differ)}; set them back")
