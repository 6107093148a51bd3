"""Names and formats of the files in a training run's folder that both the trainer and the report use."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import msgspec

from router_replay.errors import MeasureError

METRICS_FILE = "metrics.jsonl"
"""The metrics file: one JSON object per step, with the step's number and named values (numbers or null)."""
CONFIG_FILE = "config.json"
"""The file with the settings that the run was started with."""
LAST_STEP = 1 << 53  # every JSON reader represents integers up to here exactly


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Read the steps of metrics.jsonl in `folder`, the output folder of a run, in order.

    A last line without a line end was cut off when the run was killed; it is left out.
    """
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
        elif value is not None:
            shown = repr(value)[:80] if isinstance(value, str) else f"a {type(value).__name__}"
            raise MeasureError(f"{where}: {name[:80]} must be a number or null, got {shown}")
    return values


def _by_the_slow_reader(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise MeasureError(f"{where} is not JSON ({error}); remove this line to read the rest") from error
