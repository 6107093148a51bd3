"""Names and formats of the files in a training run's folder that both the trainer and the report use."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import msgspec

from router_replay.errors import MeasureError

METRICS_FILE = "metrics.jsonl"
"""The metrics file: one JSON object per step, with the step's number and named values.

A value is a number or null; a name that ends with `PER_LAYER` has a list of these, one for each routed layer.
"""
PER_LAYER = "/layers"
CONFIG_FILE = "config.json"
"""The file with the settings that the run was started with."""
LOCK_FILE = "run.lock"
"""The file by which a run holds its folder; it is there before any other."""
LAST_STEP = 1 << 53  # every JSON reader represents integers up to here exactly


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Read the steps of metrics.jsonl in `folder`, the output folder of a run, in order: numbers and None by name.

    The lists of values per layer are left out; `read_layers` has them. A last line without a line end was cut off when
    the run was killed; it is left out.
    """
    return [{name: one for name, one in line.items() if type(one) is not list} for line in read_lines(folder)]


def read_layers(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Read the values per layer of metrics.jsonl in `folder`: for each step its number, and lists by name.

    `routing/layers` has the ids of the layers. Steps without such values are left out.
    """
    found = []
    for line in read_lines(folder):
        lists = {name: one for name, one in line.items() if type(one) is list}
        if lists:
            found.append({"step": line["step"], **lists})
    return found


def read_lines(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl in `folder` whole: what `read_metrics` and `read_layers` read of it."""
    path = folder / METRICS_FILE
    if not path.is_file():
        raise MeasureError(f"there is no {METRICS_FILE} in {folder}: give the `output` folder of a training run")
    *lines, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_parsed(line, path, position) for position, line in enumerate(lines, 1)]


def _parsed(line: str, path: pathlib.Path, position: int) -> dict[str, Any]:
    """Parse the values of a line; NaN and numbers that overflow a float, such as 1e999, become None."""
    where = f"{path}:{position}"
    try:
        values = msgspec.json.decode(line)
    except (ValueError, RecursionError):  # NaN or 1e999 of another writer: only Python's slower reader takes it
        values = _by_the_slow_reader(line, where)
    step = values.get("step") if isinstance(values, dict) else None
    if type(step) is not int or abs(step) > LAST_STEP:
        raise MeasureError(
            f"{where}: expected a JSON object whose step is an integer of at most 2**53, got {line[:80]}"
        )
    for name, value in values.items():
        if isinstance(value, int | float):
            if not -sys.float_info.max <= value <= sys.float_info.max:
                values[name] = None
        elif isinstance(value, list) and name.endswith(PER_LAYER):
            values[name] = [_entry(one, name, where) for one in value]
        elif value is not None:
            raise MeasureError(f"{where}: {name[:80]} must be a number or null, got {_shown(value)}")
    return values


def _entry(value: Any, name: str, where: str) -> float | None:
    """Return an entry of a list of values per layer, None if it is not finite."""
    if isinstance(value, int | float):
        return value if -sys.float_info.max <= value <= sys.float_info.max else None
    if value is not None:
        raise MeasureError(f"{where}: {name[:80]} must hold numbers or null, got {_shown(value)}")
    return None


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str) else f"a {type(value).__name__}"


def _by_the_slow_reader(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise MeasureError(f"{where} is not JSON ({error}); remove this line to read the rest") from error


class MetricsTail:
    """Read the metrics file of the run in `folder` as it grows; `lines` has those that were read, whole.

    A run that is resumed replaces the file; it is then read from its start again.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self._file_id: tuple[int, int] | None = None
        self._end = 0

    def read(self) -> bool:
        """Read the lines that were finished since the last call; return whether `lines` changed.

        A file that does not exist yet has no lines. Raises MeasureError for a line that cannot be read.
        """
        path = self.folder / METRICS_FILE
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            now = os.fstat(file.fileno())
            changed = False
            if self._file_id != (now.st_dev, now.st_ino) or now.st_size < self._end:
                self._file_id, self._end = (now.st_dev, now.st_ino), 0
                changed, self.lines = bool(self.lines), []
            file.seek(self._end)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        first = len(self.lines) + 1
        texts = whole.decode("utf-8", errors="replace").split("\n")[:-1]
        self.lines = [*self.lines, *(_parsed(text, path, position) for position, text in enumerate(texts, first))]
        self._end += len(whole)
        return changed or bool(texts)
