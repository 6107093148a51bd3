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
from router_replay.report.runs import Run

LAYER = re.compile(r"^(?P<head>.*?)[/_.]?\blayers?[/_.]?(?P<layer>\d+)(?P<tail>.*)$")
"""A metric of one layer, such as routes/agreement/layer_12."""
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
_SHARES = re.compile(r"(share|fraction|agreement|idle|confidence|without_signal)$")
_COUNTS = re.compile(r"^(tokens|version|turns|episodes/.*|routes/(replayed|live)|async/(ready|tokens_.*))$")


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
    layers = _layers(names)
    others = [_unnamed(name) for name in sorted(set(names) - {chart.metric for chart in CHARTS} - set(layers))]
    by_layer = [figure for family in _families(layers) for figure in _heat_maps(runs, family, layers)]
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


def _layers(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return (family, layer) of the metrics whose name has the number of a layer; families of one are left alone."""
    found = {
        name: (f"{match['head']}{match['tail']}", int(match["layer"])) for name in names if (match := LAYER.match(name))
    }
    families = [family for family, _ in found.values()]
    return {name: place for name, place in found.items() if families.count(place[0]) > 1}


def _families(layers: dict[str, tuple[str, int]]) -> list[str]:
    return sorted({family for family, _ in layers.values()})


def _heat_maps(runs: Sequence[Run], family: str, layers: dict[str, tuple[str, int]]) -> list[Figure]:
    metrics = sorted((layer, name) for name, (found, layer) in layers.items() if found == family)
    found = []
    for run in runs:
        own = [(layer, name) for layer, name in metrics if name in run.metrics]
        if own:
            found.append(_heat_map(run, family, own))
    return found


def _heat_map(run: Run, family: str, own: Sequence[tuple[int, str]]) -> Figure:
    steps = [line["step"] for line in run.steps]
    grid = Grid(min(steps), -(-(max(steps) - min(steps) + 1) // MOST_COLUMNS))
    edges = list(range(grid.first, max(steps) + 1, grid.width))
    edges.append(edges[-1] + grid.width)
    values = []
    for _, name in own:
        row: list[float | None] = [None] * (len(edges) - 1)
        for point in grid.gather(*run.column(name)):
            row[(point.step - grid.first) // grid.width] = None if point.mean is None else short(point.mean)
        values.append(row)
    data = {
        "kind": _unnamed(family.rstrip("/_.")).kind,
        "across": "step",
        "down": "layer",
        "edges": edges,
        "rows": [layer for layer, _ in own],
        "values": values,
        "metric": family,
    }
    return Figure("grid", f"{family} by layer: {run.name}", "mean of the steps of a cell", data, wide=True)
