"""Read finished or running runs, and compare them.

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
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from router_replay.errors import MeasureError
from router_replay.number_format import Kind, number
from router_replay.run_files import CONFIG_FILE, read_lines

LAST_STEPS = 3
"""The reward at the end is the mean over this many steps: a single step is noisy."""
LARGEST = 1e290
DEEPEST = 64  # maximum nesting depth of a config
LONGEST_SETTING = 300  # maximum number of characters shown of a setting


@dataclasses.dataclass(frozen=True)
class Run:
    """Name the output `folder` of a run. The table and the charts show `name`."""

    name: str
    folder: pathlib.Path

    @classmethod
    def with_lines(cls, name: str, folder: pathlib.Path, lines: list[dict[str, Any]]) -> Run:
        """Return the run `name` of `folder` with the `lines` of metrics.jsonl that were read before."""
        run = cls(name, folder)
        run.__dict__["lines"] = lines
        return run

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl: numbers by name, and lists of numbers, one for each layer."""
        return read_lines(self.folder)

    @functools.cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without the lists."""
        return [{name: one for name, one in line.items() if type(one) is not list} for line in self.lines]

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Return the settings of the run; empty if it has no config.json."""
        path = self.folder / CONFIG_FILE
        if not path.exists():
            return {}
        advice = "write it again, or remove it to make the report without settings"
        try:
            config = json.loads(path.read_text(encoding="utf-8"), parse_constant=str, parse_float=_float_or_text)
        except (ValueError, RecursionError) as error:
            raise MeasureError(f"{path} is not JSON ({error}); {advice}") from error
        if not isinstance(config, dict) or _is_deeper(config, DEEPEST):
            raise MeasureError(f"{path} must hold an object of settings, at most {DEEPEST} levels deep; {advice}")
        return config

    def column(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that have `metric`, and its values.

        A value is NaN if it was not finite or is beyond 1e290, so that sums, differences and percentages of the others
        stay finite.
        """
        if metric not in self._columns:
            lines = [line for line in self.steps if metric in line]
            values = np.array([line[metric] for line in lines], np.float64)
            values[np.abs(values) > LARGEST] = np.nan
            self._columns[metric] = np.array([line["step"] for line in lines], np.int64), values
        return self._columns[metric]

    @functools.cached_property
    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {}

    def values(self, metric: str) -> list[float]:
        """Return the finite values of `metric`."""
        _, values = self.column(metric)
        return values[~np.isnan(values)].tolist()

    @functools.cached_property
    def metrics(self) -> list[str]:
        """Return the names of all metrics, in alphabetical order."""
        names: set[str] = set()
        for line in self.steps:
            names.update(line)
        return sorted(names - {"step"})


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold the numbers of one run. None means that the run did not record the metric.

    - `name` and `steps`: the run, and the number of its steps.
    - `reward_first` and `reward_last`: the reward of the first step, and the mean over the last three.
    - `k3_first` and `k3_mean`: the metric mismatch/k3 of the first step, and its mean.
    - `extreme_mean` and `agreement_mean`: the means of mismatch/extreme_tau2 and of routes/agreement, from 0 to 1.
    - `rows_replayed` and `rows_live`: sums over all steps and passes.
    - `seconds_per_step`: the median.
    - `ratios`: this run's numbers divided by those of the first run; None if the first one is 0 or not recorded.
    - `not_finite`: the number of steps, by metric, whose value was NaN, infinite or beyond 1e290. No mean or sum
      includes these steps.
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
    """Describe one line of the printed table: a field of Row, its label and its meaning."""

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


def _float_or_text(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def comparison(runs: Sequence[Run]) -> list[Row]:
    """Return one Row per run, in the order of `runs`. Ratios are relative to the first one."""
    rows = [_row(run) for run in runs]
    return [dataclasses.replace(row, ratios=_ratios(row, rows[0])) for row in rows]


def _row(run: Run) -> Row:
    last_rewards = [value for value in run.column("reward")[1][-LAST_STEPS:].tolist() if not math.isnan(value)]
    replayed, live = run.values("routes/replayed"), run.values("routes/live")
    seconds = run.values("seconds/step")
    missing = {name: int(np.isnan(run.column(name)[1]).sum()) for name in run.metrics}
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
    steps, values = run.column(metric)
    if not len(steps) or metric not in run.steps[0] or math.isnan(values[0]):
        return None
    return float(values[0])


def _mean(run: Run, metric: str) -> float | None:
    values = run.values(metric)
    return statistics.fmean(values) if values else None


def _ratios(row: Row, first: Row) -> dict[str, float | None]:
    return {field: _ratio(getattr(row, field), getattr(first, field)) for field in RATIO_FIELDS}


def _ratio(value: float | None, base: float | None) -> float | None:
    ratio = value / base if value is not None and base else math.nan
    return ratio if math.isfinite(ratio) else None


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return remarks that a comparison needs: runs of different lengths, and steps that no mean includes."""
    found = []
    if len({row.steps for row in rows}) > 1:
        lengths = ", ".join(f"{row.name}: {row.steps}" for row in rows)
        found.append(f"The runs have different numbers of steps ({lengths}); each mean is over the run's own steps.")
    for row in rows:
        if row.not_finite:
            counts = ", ".join(f"{name} in {count} of {row.steps}" for name, count in row.not_finite.items())
            found.append(
                f"{row.name}: values that are not finite, or beyond 1e290, are left out of the means: {counts} steps."
            )
    return found


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, as (dotted name, one text per run).

    The list is empty if a run has no settings.
    """
    flat = [_flat(run.config) for run in runs]
    if not all(flat):
        return []
    names = dict.fromkeys(name for settings in flat for name in settings)
    table = [(name, [settings.get(name, "") for settings in flat]) for name in names if name != "output"]
    return [(_cut(name), [_cut(text) for text in texts]) for name, texts in table if len(set(texts)) > 1]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else f"{text[:LONGEST_SETTING]}…"


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def cells(line: Line, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return (number, ratio) per run; the ratio is empty for the first run and if there is none."""
    ratios = ["", *(number(row.ratios[line.field], "ratio") if line.field in row.ratios else "" for row in rows[1:])]
    return [(number(getattr(row, line.field), line.kind), ratio) for row, ratio in zip(rows, ratios, strict=True)]


def as_text(rows: Sequence[Row]) -> str:
    """Return the table of `rows` for a terminal: a line per number, a column per run, with ratios to the first run."""
    table = [["", *(text for row in rows for text in (_printable(row.name), ""))]]
    table += [[line.label, *(text for cell in cells(line, rows) for text in cell)] for line in LINES]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    printed = []
    for label, *texts in table:
        columns = [text.rjust(width) for text, width in zip(texts, widths[1:], strict=True)]
        printed.append("  ".join([label.ljust(widths[0]), *columns]).rstrip())
    printed.insert(1, "-" * max(map(len, printed)))
    ratio = [f"× is the ratio to {rows[0].name}."] if len(rows) > 1 else []
    return "\n".join([*printed, *(f"\n{_printable(remark)}" for remark in [*ratio, *remarks(rows)])])


def _printable(text: str) -> str:
    """Escape text for a terminal: names come from folders and files and may contain control sequences."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
