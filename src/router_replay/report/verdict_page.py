"""The page of `router-replay verify`: the verdict, where the routers disagree, and the log-probs before and after.

What is larger than a screen can show is put into bins, so that the size of the page does not grow with the tokens.
Shapes: N compared rows, L routed layers, E experts, S sampled tokens.
"""

from __future__ import annotations

import dataclasses
import html
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from router_replay.number_format import Kind, number
from router_replay.report.page import (
    Figure,
    check_name,
    figures,
    notes_list,
    page,
    scrolled,
    short,
    swatch,
    toggles,
    verdict_box,
    write_both,
)

MOST_CELLS, MOST_COLUMNS = 6000, 120
"""Cells and columns of a heat map: more make the page slow and cannot be told apart."""
MOST_POINTS = 2000
"""Up to this many tokens are drawn one by one; of more, the farthest ones, and the others in cells."""
FARTHEST = 500
SCATTER_CELLS = 60
RATIO_BINS = 80
TAUS = (2.0, 5.0)
"""The ratios of probabilities that are marked. The first one is that of F(2), the extreme tokens."""
PASSES = ("live", "replayed")
EXPLANATION = (
    "An engine sampled these tokens and said which experts it used. The trainer's model ran the same tokens, once with "
    "its own choice of experts (live) and once with the engine's (replayed)."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """Hold what `verify` saw, token by token.

    `layers` are the ids of the routed layers. `sequence` [N] and `position` [N] say which rows were compared, and
    `differs` [N, L] where the engine's set of experts is not the live one. `load` [L, E] counts how often the engine
    chose each expert. `engine`, `live` and `replayed` [S] are the log-probs of the sampled tokens, None where there are
    none, and `token_sequence` and `token_position` [S] their places.
    """

    layers: tuple[int, ...]
    sequence: np.ndarray
    position: np.ndarray
    differs: np.ndarray
    load: np.ndarray
    engine: np.ndarray | None = None
    live: np.ndarray | None = None
    replayed: np.ndarray | None = None
    token_sequence: np.ndarray | None = None
    token_position: np.ndarray | None = None


def write_verdict(verdict: Mapping[str, Any], lines: Sequence[str], seen: Seen, out: pathlib.Path) -> None:
    """Write the page of a verdict to `out`, and its data to the same path with the suffix .json.

    `verdict` is the verdict as JSON, `lines` are those of the terminal, and `seen` is what was seen of the tokens.
    Raise ConfigError if `out` ends in .json, or if the plotting library is not installed.
    """
    check_name(out)
    drawn = verdict_figures(seen, verdict.get("expected"))
    title = "Router Replay: do the routes belong to the tokens?"
    finding = verdict.get("finding")
    box = (
        verdict_box(True, "The routes belong to the tokens.", [verdict["source"]])
        if finding is None
        else verdict_box(
            False, f"Fault {finding['fault']}: {finding['cause']}.", [finding["detail"], verdict["source"]]
        )
    )
    printed = html.escape("\n".join(lines))
    tools = toggles(PASSES, "Passes") if seen.live is not None else ""
    body = f"""<p class="lead">{html.escape(EXPLANATION)}</p>
{box}
{_gaps(verdict, seen)}
{notes_list([*_split(verdict.get("split")), *verdict.get("notes", ())])}
<h2>Where they disagree</h2>
<div class="tools">{tools}</div>
{figures(drawn)}
<details><summary>The verdict as the command prints it</summary><pre tabindex="0">{printed}</pre></details>"""
    data = {"title": title, "verdict": verdict, "charts": [one.as_json() for one in drawn]}
    write_both(out, page(title, body, {"runs": [], "charts": data["charts"]}), data)


def _gaps(verdict: Mapping[str, Any], seen: Seen) -> str:
    """Return the table of the gaps before and after replay; empty without log-probs."""
    if verdict.get("live") is None or seen.engine is None or seen.live is None:
        return ""
    rows = [
        _line("k3", "KL estimate, engine to trainer", "small", [_of(verdict, one, "k3") for one in PASSES]),
        _line("mean |log-prob gap|", "in nats", "small", [_of(verdict, one, "abs_mean") for one in PASSES]),
    ]
    passes = [seen.live, seen.replayed]
    for tau in TAUS:
        far = [None if own is None else float(np.mean(np.abs(own - seen.engine) > math.log(tau))) for own in passes]
        rows.append(_line(f"F({tau:g})", f"tokens more than a factor {tau:g} apart", "share", far))
    heads = "".join(f'<th scope="col">{swatch(index)}{name}</th>' for index, name in enumerate(PASSES))
    return scrolled(f"<thead><tr><th></th>{heads}</tr></thead>", "".join(rows))


def _split(split: Mapping[str, Any] | None) -> list[str]:
    """Say what causes the gap that remains after replay, if the verdict has it."""
    if split is None or split.get("gates") is None:
        return []
    gates, rest = number(split["gates"], "share"), number(split["rest"], "share")
    return [f"What remains of k3 after replay: gate weights {gates}, the rest of the arithmetic {rest}. {split['how']}"]


def _of(verdict: Mapping[str, Any], name: str, field: str) -> float | None:
    gap = verdict.get(name)
    return None if gap is None else gap[field]


def _line(label: str, meaning: str, kind: Kind, values: Sequence[float | None]) -> str:
    cells = "".join(f"<td>{number(value, kind)}</td>" for value in values)
    return f'<tr><th scope="row">{html.escape(label)}<small>{html.escape(meaning)}</small></th>{cells}</tr>'


def verdict_figures(seen: Seen, expected: float | None) -> list[Figure]:
    """Return the figures of what was `seen`; `expected` is the share of pairs that rounding alone makes differ."""
    drawn = [_heat_map(seen)]
    if seen.engine is not None and seen.live is not None and len(seen.engine):
        drawn += [_scatter(seen), _histogram(seen)]
    return [*drawn, _per_layer(seen, expected), load_figure(seen.layers, seen.load)]


def _heat_map(seen: Seen) -> Figure:
    columns = max(20, min(MOST_COLUMNS, MOST_CELLS // max(1, len(seen.layers))))
    length = int(seen.position.max()) + 1
    width = -(-length // columns)
    bins = seen.position // width
    counts = np.bincount(bins, minlength=-(-length // width))
    values = []
    for column in range(len(seen.layers)):
        found = np.bincount(bins, weights=seen.differs[:, column], minlength=len(counts))
        values.append([short(a / b) if b else None for a, b in zip(found.tolist(), counts.tolist(), strict=True)])
    data = {
        "kind": "share",
        "zero": True,
        "across": "position",
        "down": "layer",
        "unit": "of the rows differ",
        "edges": [*range(0, len(counts) * width, width), len(counts) * width],
        "rows": list(seen.layers),
        "values": values,
        "counts": counts.tolist(),
    }
    meaning = "share of the rows in which the engine chose other experts than the live router, over all sequences"
    return Figure("grid", "Disagreement by layer and position", meaning, data, wide=True)


def _per_layer(seen: Seen, expected: float | None) -> Figure:
    data = {
        "kind": "share",
        "rows": list(range(len(seen.layers))) if len(set(seen.layers)) < len(seen.layers) else list(seen.layers),
        "values": [short(value) for value in seen.differs.mean(axis=0).tolist()],
        "expected": expected,
    }
    meaning = "share of all rows; the dashed line is what another number type of the trainer gives"
    return Figure("bars", "Disagreement by layer", meaning, data, wide=True)


def load_figure(layers: Sequence[int], load_LE: np.ndarray) -> Figure:
    """Return the heat map of the expert load: `load_LE` [L, E] counts the tokens of each expert in `layers`.

    With many experts, neighbours share a cell and the largest of them is shown.
    """
    experts = load_LE.shape[1]
    width = -(-experts // max(20, min(256, MOST_CELLS // max(1, len(layers)))))
    even = np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-9)
    relative = load_LE / even
    starts = np.arange(0, experts, width)
    values = np.maximum.reduceat(relative, starts, axis=1)
    data = {
        "kind": "ratio",
        "zero": True,
        "across": "expert",
        "down": "layer",
        "unit": "the even load",
        "edges": [*starts.tolist(), int(starts[-1]) + width],
        "rows": list(layers),
        "values": [[short(value) for value in row] for row in values.tolist()],
    }
    shared = f"; a cell is the largest of {width} experts" if width > 1 else ""
    return Figure("grid", "Expert load", f"1 is an even load, 0 an expert without a token{shared}", data, wide=True)


# -- log-probs --------------------------------------------------------------------------------------


def _passes(seen: Seen) -> list[np.ndarray]:
    return [own for own in (seen.live, seen.replayed) if own is not None]


def _scatter(seen: Seen) -> Figure:
    assert seen.engine is not None
    engine, passes = seen.engine, _passes(seen)
    low = min(float(engine.min()), *(float(own.min()) for own in passes))
    high = max(float(engine.max()), *(float(own.max()) for own in passes))
    low, high = (low, high) if low < high else (low - 1, high + 1)
    data = {"domain": [short(low), short(high)], "groups": [_points(seen, own, low, high) for own in passes]}
    many = f"; of more than {MOST_POINTS:,} tokens, cells stand for many" if len(engine) > MOST_POINTS else ""
    meaning = f"one point per sampled token, on the line if both agree{many}"
    return Figure("scatter", "Log-probs, engine against trainer", meaning, data, PASSES[: len(passes)])


def _points(seen: Seen, own: np.ndarray, low: float, high: float) -> dict[str, Any]:
    """Return the columns of one pass: points with their place; with many tokens, the farthest and cells of the rest."""
    assert seen.engine is not None
    assert seen.token_sequence is not None
    assert seen.token_position is not None
    count = len(own)
    farthest = np.argsort(-np.abs(own - seen.engine), kind="stable")
    single = np.sort(farthest[:FARTHEST]) if count > MOST_POINTS else np.arange(count)
    group: dict[str, Any] = {
        "x": [short(value) for value in seen.engine[single].tolist()],
        "y": [short(value) for value in own[single].tolist()],
        "sequence": seen.token_sequence[single].tolist(),
        "position": seen.token_position[single].tolist(),
    }
    if count > MOST_POINTS:
        rest = farthest[FARTHEST:]
        step = (high - low) / SCATTER_CELLS
        cells = [np.minimum((side[rest] - low) // step, SCATTER_CELLS - 1) for side in (seen.engine, own)]
        found, tokens = np.unique(np.stack(cells, axis=1), axis=0, return_counts=True)
        middles = (low + (found + 0.5) * step).tolist()
        group["n"] = [1] * len(single) + tokens.tolist()
        for name, side in (("x", 0), ("y", 1)):
            group[name] += [short(middle[side]) for middle in middles]
        for name in ("sequence", "position"):
            group[name] += [None] * len(found)
    return group


def _histogram(seen: Seen) -> Figure:
    assert seen.engine is not None
    gaps = [own - seen.engine for own in _passes(seen)]
    far = max(float(np.abs(gap).max()) for gap in gaps)
    end = min(max(far, 1.2 * math.log(TAUS[0])), math.log(64))
    edges = np.linspace(-end, end, RATIO_BINS + 1)
    counts = [np.histogram(np.clip(gap, -end, end), edges)[0].tolist() for gap in gaps]
    data = {"edges": [short(edge) for edge in edges.tolist()], "counts": counts, "taus": list(TAUS)}
    beyond = "; ratios beyond 64 are in the last bars" if far > end else ""
    meaning = f"all would be 1 if engine and trainer agreed; beyond the marks τ a token is extreme{beyond}"
    return Figure("histogram", "Ratios of the probabilities", meaning, data, PASSES[: len(gaps)])
