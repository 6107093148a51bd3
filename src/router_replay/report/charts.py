"""Draw curves as inline SVG, without a library or network access.

Colours are classes (c0, c1, ...) that the page's style defines.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence

from router_replay.number_format import Kind, number
from router_replay.report.bins import Point
from router_replay.report.scales import TINY, Scale, linear_scale, log_scale, step_scale

COLOURS = 7
WIDTH, HEIGHT = 440, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 32
MOST_DOTS = 40
"""Runs of up to this many steps get a dot at each step."""
LABEL_GAP = 12
"""The minimum distance of two labels of the vertical axis."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """Describe which metric is drawn, and how: `log` asks for a logarithmic axis, `from_zero` for an axis with 0."""

    metric: str
    title: str
    meaning: str
    kind: Kind
    log: bool = False
    from_zero: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
    """Hold one run's curve. Values that were not finite are marked at the top edge. `last` is the last value."""

    name: str
    points: Sequence[Point]
    last: float | None


@dataclasses.dataclass(frozen=True)
class _Frame:
    x: Scale
    y: Scale

    def at(self, step: int, value: float) -> tuple[float, float]:
        return self.across(step), self.up(value)

    def across(self, step: float) -> float:
        return round(LEFT + self.x.place(step) * (WIDTH - LEFT - RIGHT), 1)

    def up(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - TOP - BOTTOM), 1)


def figure(chart: Chart, series: Sequence[Series]) -> str:
    """Return the chart as HTML, with its title and a legend of each run's last value or the one under the pointer."""
    scale = ", log scale" if chart.log else ""
    keys = "".join(
        f'<span class="run"><i class="swatch c{index % COLOURS}"></i><span class="name">{html.escape(one.name)}</span>'
        f"<b>{html.escape(number(one.last, chart.kind))}</b></span>"
        for index, one in enumerate(series)
    )
    return (
        f"<figure><figcaption><h3>{html.escape(chart.title)}</h3>"
        f'<p class="meaning">{html.escape(chart.meaning)}{scale}</p>'
        f'<p class="key">{keys}</p></figcaption>{_svg(chart, series)}</figure>'
    )


def _svg(chart: Chart, series: Sequence[Series]) -> str:
    values = [value for one in series for point in one.points for value in (point.low, point.high) if value is not None]
    if not values:
        return '<p class="nothing">not recorded in these runs</p>'
    steps = [point.step for one in series for point in one.points]
    log = chart.log and max(values) > TINY
    frame = _Frame(step_scale(steps), log_scale(values) if log else linear_scale(values, chart.kind, chart.from_zero))
    curves = "".join(_curve(one, index, frame) for index, one in enumerate(series))
    names = ", ".join(one.name for one in series)
    label = html.escape(f"{chart.title} over steps: {names}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-points="{_hover(chart, series, frame)}">'
        f'{_axes(frame)}<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{curves}{_pointers(len(series))}</svg>'
    )


def _axes(frame: _Frame) -> str:
    parts, free_from = [], float("inf")
    for value, label in frame.y.ticks:
        y = frame.up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        if y <= free_from:  # labels of a logarithmic axis can be closer than a line of text
            parts.append(f'<text class="tick y" x="{LEFT - 8}" y="{y}">{html.escape(label)}</text>')
            free_from = y - LABEL_GAP
    for index, (value, label) in enumerate(frame.x.ticks):
        label = label if index else f"step {label}"
        parts.append(f'<text class="tick x" x="{frame.across(value)}" y="{HEIGHT - 8}">{html.escape(label)}</text>')
    return "".join(parts)


def _curve(series: Series, index: int, frame: _Frame) -> str:
    style = f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")
    parts = []
    for stretch in _stretches(series.points):
        places = [frame.at(step, mean) for step, _, mean, _ in stretch]
        if any(low != high for _, low, _, high in stretch):
            parts.append(_band([(step, low, high) for step, low, _, high in stretch], style, frame))
        if len(places) > 1:
            parts.append(f'<path class="curve {style}" d="M{_corners(places)}"/>')
        if len(places) == 1 or len(series.points) <= MOST_DOTS:
            parts += [f'<circle class="dot {style}" cx="{x}" cy="{y}" r="2"/>' for x, y in places]
    for point in series.points:
        if point.not_finite:
            x = frame.across(point.step)
            parts.append(f'<path class="curve {style}" d="M{round(x - 3, 1)} {TOP - 6}l6 6m0-6l-6 6"/>')
    return "".join(parts)


def _band(stretch: Sequence[tuple[int, float, float]], style: str, frame: _Frame) -> str:
    """Draw the band from the smallest to the largest value of each bin, which shows spikes of a single step."""
    edge = [frame.at(step, high) for step, _, high in stretch]
    edge += [frame.at(step, low) for step, low, _ in reversed(stretch)]
    return f'<path class="band {style}" d="M{_corners(edge)}Z"/>'


def _corners(places: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x} {y}" for x, y in places)


def _stretches(points: Sequence[Point]) -> list[list[tuple[int, float, float, float]]]:
    """Return the (step, low, mean, high) of the points, split into stretches where no value was finite."""
    stretches: list[list[tuple[int, float, float, float]]] = [[]]
    for point in points:
        if point.low is None or point.mean is None or point.high is None:
            stretches.append([])
        else:
            stretches[-1].append((point.step, point.low, point.mean, point.high))
    return [stretch for stretch in stretches if stretch]


def _pointers(count: int) -> str:
    dots = "".join(f'<circle class="pointer c{index % COLOURS}" r="3.5"/>' for index in range(count))
    return f'{dots}<text class="tick x at" y="{HEIGHT - 8}"></text>'


def _hover(chart: Chart, series: Sequence[Series], frame: _Frame) -> str:
    """Return the hover data: step, x, y (null if not finite) and text per run and step.

    The page's script only looks these up.
    """
    table = [
        [
            [
                point.step,
                frame.across(point.step),
                None if point.mean is None else frame.up(point.mean),
                _said(point, chart.kind),
            ]
            for point in one.points
        ]
        for one in series
    ]
    return html.escape(json.dumps(table, separators=(",", ":")), quote=True)


def _said(point: Point, kind: Kind) -> str:
    if point.mean is None:
        return "not finite"
    if point.low == point.high:
        return number(point.mean, kind)
    return f"{number(point.mean, kind)} ({number(point.low, kind)} to {number(point.high, kind)})"
