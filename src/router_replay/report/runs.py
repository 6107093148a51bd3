"""Reading finished or running runs, and comparing them.

runs = [Run("off", Path("out/demo/off")), Run("r3", Path("out/demo/r3"))]
rows = comparison(runs)
rows[1].k3_first            # 2.5e-4
rows[1].ratios["k3_first"]  # 0.13: against the first run
print(as_text(rows))
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from router_replay.errors import MeasureError
from router_replay.report.numbers import Kind, number

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
LAST_STEPS = 3
"""The reward at the end is the mean over this many steps: a single step is noisy."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder, under the name that the table and the charts call it by."""

    name: str
    folder: pathlib.Path

    @functools.cached_property
    def steps(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What the run was started with; empty where it left no config.json."""
        path = self.folder / CONFIG_FILE
        if not path.exists():
            return {}
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise MeasureError(f"{path} is not JSON ({error}); write it anew, or remove it to do without") from error
        return config if isinstance(config, dict) else {}

    def points(self, metric: str) -> list[tuple[int, float | None]]:
        """(step, value) wherever the metric was written; None where it was not finite."""
        return [(line["step"], line[metric]) for line in self.steps if metric in line]

    def values(self, metric: str) -> list[float]:
        return [value for _, value in self.points(metric) if value is not None]


@dataclasses.dataclass(frozen=True)
class Row:
    """What one run comes to. None: not recorded. `ratios` are against the first run's numbers.

    `not_finite` counts, per metric, the steps whose value was NaN or infinite and is in no mean here.
    """

    name: str
    steps: int
    reward_first: float | None
    reward_last: float | None
    k3_first: float | None
    k3_mean: float | None
    extreme_mean: float | None
    agreement_mean: float | None
    rows_replayed: int | None
    rows_live: int | None
    seconds_per_step: float | None
    ratios: dict[str, float | None]
    not_finite: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the printed table: a field of Row, in words."""

    field: str
    label: str
    meaning: str
    kind: Kind


LINES = (
    Line("steps", "Steps", "", "count"),
    Line("reward_first", "Reward, first step", "", "plain"),
    Line("reward_last", "Reward, last steps", f"mean of the last {LAST_STEPS}", "plain"),
    Line("k3_first", "k3, first step", "KL estimate, engine to trainer; 0 is no mismatch", "small"),
    Line("k3_mean", "k3, all steps", "mean", "small"),
    Line("extreme_mean", "Extreme tokens", "probabilities more than a factor 2 apart", "share"),
    Line("agreement_mean", "Agreement", "the trainer's own router would choose the same experts", "share"),
    Line("rows_replayed", "Rows replayed", "over all passes", "count"),
    Line("rows_live", "Rows live", "over all passes", "count"),
    Line("seconds_per_step", "Seconds per step", "median", "seconds"),
)
RATIO_FIELDS = ("k3_first", "k3_mean", "extreme_mean", "seconds_per_step")


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The steps of a run's metrics.jsonl, in order. A last line without its end was torn by a kill: left out."""
    path = folder / METRICS_FILE
    if not path.is_file():
        raise MeasureError(f"there is no {METRICS_FILE} in {folder}: give the `output` folder of a training run")
    *lines, _torn = path.read_text(errors="replace").split("\n")
    return [_parsed(line, f"{path}:{position}") for position, line in enumerate(lines, 1)]


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line, parse_constant=lambda _: None)  # NaN, of a file that others wrote
    except ValueError as error:
        raise MeasureError(f"{where} is not JSON ({error}); remove that line, and the rest can be read") from error
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise MeasureError(f"{where}: a line must be an object with a whole number as its step, got {line[:80]}")
    for name, value in values.items():
        if value is not None and not isinstance(value, int | float):
            raise MeasureError(f"{where}: {name} must be a number or null, got {value!r}")
    return values


def comparison(runs: Sequence[Run]) -> list[Row]:
    """One row per run, in the order given."""
    rows = [_row(run) for run in runs]
    return [dataclasses.replace(row, ratios=_ratios(row, rows[0])) for row in rows]


def _row(run: Run) -> Row:
    rewards = [value for _, value in run.points("reward")]
    last_rewards = [value for value in rewards[-LAST_STEPS:] if value is not None]
    replayed, live = run.values("routes/replayed"), run.values("routes/live")
    seconds = run.values("seconds/step")
    names = sorted({name for line in run.steps for name in line})
    missing = {name: sum(value is None for _, value in run.points(name)) for name in names}
    return Row(
        name=run.name,
        steps=len(run.steps),
        reward_first=_at_first_step(run, "reward"),
        reward_last=statistics.fmean(last_rewards) if last_rewards else None,
        k3_first=_at_first_step(run, "mismatch/k3"),
        k3_mean=_mean(run, "mismatch/k3"),
        extreme_mean=_mean(run, "mismatch/extreme_tau2"),
        agreement_mean=_mean(run, "routes/agreement"),
        rows_replayed=round(sum(replayed)) if replayed else None,
        rows_live=round(sum(live)) if live else None,
        seconds_per_step=statistics.median(seconds) if seconds else None,
        ratios={},
        not_finite={name: count for name, count in missing.items() if count},
    )


def _at_first_step(run: Run, metric: str) -> float | None:
    return run.steps[0].get(metric) if run.steps else None


def _mean(run: Run, metric: str) -> float | None:
    values = run.values(metric)
    return statistics.fmean(values) if values else None


def _ratios(row: Row, first: Row) -> dict[str, float | None]:
    return {field: _ratio(getattr(row, field), getattr(first, field)) for field in RATIO_FIELDS}


def _ratio(value: float | None, base: float | None) -> float | None:
    ratio = value / base if value is not None and base else math.nan
    return ratio if math.isfinite(ratio) else None


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader must know before comparing: runs of other lengths, and steps that are in no mean."""
    found = []
    if len({row.steps for row in rows}) > 1:
        lengths = ", ".join(f"{row.name}: {row.steps}" for row in rows)
        found.append(f"The runs have different numbers of steps ({lengths}); each mean is over the run's own steps.")
    for row in rows:
        if row.not_finite:
            counts = ", ".join(f"{name} in {count} of {row.steps}" for name, count in row.not_finite.items())
            found.append(f"{row.name}: not a finite number, and left out of the means: {counts} steps.")
    return found


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings that are not alike in all runs, as (dotted name, one text per run)."""
    flat = [_flat(run.config) for run in runs]
    if not all(flat):
        return []
    names = dict.fromkeys(name for settings in flat for name in settings)
    table = [(name, [settings.get(name, "") for settings in flat]) for name in names if name != "output"]
    return [(name, texts) for name, texts in table if len(set(texts)) > 1]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def cells(line: Line, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(number, ratio) per run; the ratio is empty for the first run and where there is none."""
    ratios = ["", *(number(row.ratios[line.field], "ratio") if line.field in row.ratios else "" for row in rows[1:])]
    return [(number(getattr(row, line.field), line.kind), ratio) for row, ratio in zip(rows, ratios, strict=True)]


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal: a line per number, a column per run, ratios against the first run beside them."""
    table = [["", *(text for row in rows for text in (row.name, ""))]]
    table += [[line.label, *(text for cell in cells(line, rows) for text in cell)] for line in LINES]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    printed = []
    for label, *texts in table:
        columns = [text.rjust(width) for text, width in zip(texts, widths[1:], strict=True)]
        printed.append("  ".join([label.ljust(widths[0]), *columns]).rstrip())
    printed.insert(1, "-" * max(map(len, printed)))
    ratio = [f"× is the ratio to {rows[0].name}."] if len(rows) > 1 else []
    return "\n".join([*printed, *(f"\n{remark}" for remark in [*ratio, *remarks(rows)])])
