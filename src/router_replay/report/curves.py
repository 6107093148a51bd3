"""Choose the curves of a page about runs: one chart per metric, and one heat map per run for metrics of each layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from router_replay.number_format import Kind
from router_replay.report.bins import Grid, Point
from router_replay.report.page import Figure, short
from router_replay.report.runs import LARGEST, Run
from router_replay.run_files import PER_LAYER

LAYER_IDS = f"routing{PER_LAYER}"
"""The metric with the ids of the layers, in the order of the other lists."""
MOST_COLUMNS = 100
"""A heat map over steps has about this many columns."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """Describe which metric is drawn, and how: `log` asks for a logarithmic axis, `from_zero` for an axis with 0."""

    metric: str
    title: str
    meaning: str
    kind: Kind
    log: bool = False
    from_zero: bool = False


CHARTS = (
    Chart("reward", "Reward", "mean over the step's episodes", "plain"),
    Chart("mismatch/k3", "Mismatch, k3", "KL estimate, engine to trainer", "small", log=True),
    Chart(
        "mismatch/extreme_tau2", "Extreme tokens", "probabilities more than a factor 2 apart", "share", from_zero=True
    ),
    Chart("routes/agreement", "Agreement", "the trainer's own router would choose the same experts", "share"),
    Chart("routes/agreement_worst", "Agreement of the worst layer", "the smallest of all layers", "share"),
    Chart("routing/load", "Expert load", "busiest expert over the mean, mean over layers; 1 is even", "plain"),
    Chart("routing/confidence", "Router confidence", "mass of the chosen experts", "share"),
    Chart("routing/entropy", "Router entropy", "over all experts, in nats", "plain"),
    Chart("grad_norm", "Gradient norm", "before clipping", "plain", from_zero=True),
    Chart("entropy", "Entropy", "estimated from the sampled tokens, in nats", "plain"),
    Chart("seconds/step", "Seconds per step", "all phases", "seconds", from_zero=True),
    Chart("tokens_per_second", "Tokens per second", "of the whole step", "count", from_zero=True),
    Chart("trainer/tokens_per_second", "Tokens trained per second", "of score and update", "count", from_zero=True),
    Chart("trainer/peak_share", "Share of the peak", "operations of the trainer", "share", from_zero=True),
    Chart("seconds/rollout", "Seconds of the rollout", "without the environments", "seconds", from_zero=True),
    Chart("seconds/score", "Seconds of the score", "old log-probs", "seconds", from_zero=True),
    Chart("seconds/update", "Seconds of the update", "all mini-batches", "seconds", from_zero=True),
    Chart("seconds/sync", "Seconds of the sync", "new weights into the engine", "seconds", from_zero=True),
    Chart("memory/peak_gib", "Peak memory", "GiB", "plain", from_zero=True),
)
"""The metrics that come first. Every other metric of a run follows under its own name."""
_SHARES = re.compile(r"(share|fraction|agreement(_worst)?|idle|confidence|without_signal)$")
_COUNTS = re.compile(r"^(tokens|version|.*_layer|turns|episodes/.*|routes/(replayed|live)|async/(ready|tokens_.*))$")


def curve_figures(runs: Sequence[Run], grid: Grid | None) -> tuple[list[Figure], int]:
    """Return the figures of every metric of `runs`, and the number of those that come first.

    `grid` gathers the steps of long runs. A metric of CHARTS that no run has is left out.
    """
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    steps = [_all_steps(run, grid) for run in runs]

    def drawn(chart: Chart) -> Figure:
        curves = [_curve(run, chart.metric, grid, own) for run, own in zip(runs, steps, strict=True)]
        return _curves(chart, curves, [run.name for run in runs])

    known = [chart for chart in CHARTS if chart.metric in names]
    others = [_unnamed(name) for name in sorted(set(names) - {chart.metric for chart in CHARTS})]
    by_layer = _heat_maps(runs)
    return [*map(drawn, known), *by_layer, *map(drawn, others)], len(known) + len(by_layer)


def step_columns(runs: Sequence[Run], grid: Grid | None) -> list[dict[str, Any]]:
    """Return the name and the steps of each run; curves that have all of its steps do not repeat them."""
    return [{"name": run.name, "x": _all_steps(run, grid)} for run in runs]


def _all_steps(run: Run, grid: Grid | None) -> list[int]:
    steps = np.array([line["step"] for line in run.steps], np.int64)
    return steps.tolist() if grid is None else grid.starts(steps)


def _unnamed(metric: str) -> Chart:
    if metric.startswith("seconds/") or metric.endswith("seconds"):
        return Chart(metric, metric, "", "seconds", from_zero=True)
    if _SHARES.search(metric):
        return Chart(metric, metric, "", "share")
    return Chart(metric, metric, "", "count" if _COUNTS.match(metric) else "plain")


def _curves(chart: Chart, curves: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    meaning = chart.meaning + ("; log scale, 0 lies on the lower edge" if chart.log else "")
    data = {
        "metric": chart.metric,
        "kind": chart.kind,
        "log": chart.log,
        "zero": chart.from_zero,
        "curves": curves,
    }
    return Figure("curves", chart.title, meaning, data, names)


def _curve(run: Run, metric: str, grid: Grid | None, own_steps: list[int]) -> dict[str, Any]:
    """Return the columns of a curve: `x`, unless they are `own_steps`, those of the run; the mean `m`; `lo` and `hi`,
    if they differ; `bad`, the numbers of steps that were not finite, if there are any; and the `last` value."""
    steps, values = run.column(metric)
    if not len(steps):
        return {"x": [], "m": [], "last": None}
    last = Point.of(int(steps[-1]), float(values[-1])).mean
    each = zip(steps.tolist(), values.tolist(), strict=True)
    points = [Point.of(*one) for one in each] if grid is None else grid.gather(steps, values)
    curve: dict[str, Any] = {"m": _short([point.mean for point in points]), "last": last}
    if (x := [point.step for point in points]) != own_steps:
        curve["x"] = x
    if any(point.low != point.high for point in points):
        curve |= {"lo": _short([point.low for point in points]), "hi": _short([point.high for point in points])}
    if any(point.not_finite for point in points):
        curve["bad"] = [point.not_finite for point in points]
    return curve


def _short(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else short(value) for value in values]


# -- metrics of each layer --------------------------------------------------------------------------


def layer_grids(run: Run) -> dict[str, dict[str, Any]]:
    """Return the heat map of each metric of `run` that has a value per layer: `rows`, `edges` of steps, and `values`.

    A value is the mean over the steps of its cell, None if there is none. The rows are the ids of the layers.
    """
    lines = [line for line in run.lines if any(type(value) is list for value in line.values())]
    if not lines:
        return {}
    steps = np.array([line["step"] for line in lines], np.int64)
    first, last = int(steps.min()), int(steps.max())
    grid = Grid(first, -(-(last - first + 1) // MOST_COLUMNS))
    edges = [*range(first, last + 1, grid.width)]
    edges.append(edges[-1] + grid.width)
    ids: list[Any] = next((line[LAYER_IDS] for line in lines if type(line.get(LAYER_IDS)) is list), [])
    names = sorted({name for line in lines for name, value in line.items() if type(value) is list} - {LAYER_IDS})
    return {name: {"edges": edges, **_layer_cells(lines, name, ids, grid, len(edges) - 1)} for name in names}


def _layer_cells(
    lines: Sequence[dict[str, Any]], name: str, ids: list[Any], grid: Grid, columns: int
) -> dict[str, Any]:
    own = [(line["step"], line[name]) for line in lines if type(line.get(name)) is list]
    layers = max(len(found) for _, found in own)
    table = np.full((len(own), layers), np.nan)
    for index, (_, found) in enumerate(own):
        table[index, : len(found)] = [np.nan if value is None or abs(value) > LARGEST else value for value in found]
    steps = np.array([step for step, _ in own], np.int64)
    values: list[list[float | None]] = []
    for layer in range(layers):
        row: list[float | None] = [None] * columns
        for point in grid.gather(steps, table[:, layer]):
            row[(point.step - grid.first) // grid.width] = None if point.mean is None else short(point.mean)
        values.append(row)
    return {"rows": ids if len(ids) == layers else list(range(layers)), "values": values}


def _heat_maps(runs: Sequence[Run]) -> list[Figure]:
    """Return a figure for each metric with a value per layer; its menu chooses the run."""
    grids = [(run.name, layer_grids(run)) for run in runs]
    figures = []
    for name in sorted({name for _, found in grids for name in found}):
        family = name.removesuffix(PER_LAYER)
        having = [(run, found[name]) for run, found in grids if name in found]
        data = {
            "metric": name,
            "kind": _unnamed(family).kind,
            "across": "step",
            "down": "layer",
            "grids": [grid for _, grid in having],
        }
        names = [run for run, _ in having]
        figures.append(Figure("grid", f"{family} by layer", "the menu chooses the run", data, wide=True, choices=names))
    return figures
