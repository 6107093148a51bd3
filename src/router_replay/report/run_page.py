"""The page about a few runs: a verdict on replay, the table, and a curve of every metric with the runs overlaid.

write_report([Run("off", off), Run("r3", r3)], Path("out/report.html"), "Replay off and on", ["Seeds are equal."])
"""

from __future__ import annotations

import dataclasses
import html
import pathlib
from collections.abc import Sequence
from typing import Any

from router_replay.errors import ConfigError
from router_replay.number_format import number
from router_replay.report.bins import Grid
from router_replay.report.curves import curve_figures, layer_grids, step_columns
from router_replay.report.page import (
    Figure,
    check_name,
    figures,
    notes_list,
    page,
    scrolled,
    swatch,
    toggles,
    verdict_box,
    write_both,
)
from router_replay.report.runs import LINES, Row, Run, cells, comparison, differing_settings, remarks

EXPLANATION = (
    "In reinforcement learning, an engine samples tokens and the trainer then computes their probabilities again. "
    "In a mixture-of-experts model the two may send a token to different experts, and then the trainer learns from "
    "probabilities with which no token was sampled. Replay makes the trainer use the engine's experts. This page shows "
    "how far engine and trainer were apart, what the runs learned, and what they cost."
)
GROUP_ENDS = ("reward_last", "agreement_mean")


@dataclasses.dataclass(frozen=True)
class RunPage:
    """Hold the parts of a page about `runs`: `summary` and `settings` as HTML, the `figures`, `data` and `twin`.

    `rest` is the number of the first figure that is not among the main ones.
    """

    title: str
    summary: str
    settings: str
    figures: Sequence[Figure]
    rest: int
    data: dict[str, Any]
    twin: dict[str, Any]

    @classmethod
    def of(cls, runs: Sequence[Run], title: str, notes: Sequence[str] = ()) -> RunPage:
        """Read and compare the runs; `notes` come before the remarks on the comparison."""
        rows = comparison(runs)
        grid = Grid.of([[line["step"] for line in run.steps] for run in runs])
        notes = [*notes, *remarks(rows), *([_binned(grid)] if grid else [])]
        drawn, rest = curve_figures(runs, grid)
        summary = f"{_verdict(rows)}{_table(rows)}{notes_list(notes)}"
        data = {"runs": step_columns(runs, grid), "charts": [one.as_json() for one in drawn]}
        twin = _twin(runs, rows, title, notes, grid)
        return cls(title, summary, _settings(runs), drawn, rest, data, twin)

    def as_html(self, live: str | None = None) -> str:
        """Return the page. `live` is the message of a page that updates itself, and None for one in a file."""
        state = "" if live is None else f'<p id="live" role="status">{html.escape(live)}</p>'
        names = [run["name"] for run in self.data["runs"]]
        body = f"""<p class="lead">{html.escape(EXPLANATION)}</p>
{state}
<div id="summary">{self.summary}</div>
<h2>Step by step</h2>
<div class="tools">{toggles(names, "Runs")}
<label class="filter">Metrics <input type="search" id="filter" placeholder="part of a name"></label></div>
{figures(self.figures[: self.rest])}
<h2>All other metrics</h2>
{figures(self.figures[self.rest :], self.rest)}
{self.settings}"""
        return page(self.title, body, self.data, live is not None)


def write_report(runs: Sequence[Run], out: pathlib.Path, title: str, notes: Sequence[str] = ()) -> None:
    """Write the page to `out`, and the JSON file to the same path with the suffix .json.

    `runs` are compared in the order given; ratios are relative to the first one. `title` is the heading of the page.
    `notes` are included in both files, followed by remarks on the comparison. Raise ConfigError if there are no runs,
    if `out` ends in .json, or if the plotting library is not installed.
    """
    if not runs:
        raise ConfigError("a report needs one run or more, got none: give the output folder of a run")
    check_name(out)
    made = RunPage.of(runs, title, notes)
    write_both(out, made.as_html(), made.twin)


def _binned(grid: Grid) -> str:
    return (
        f"Each point of the charts stands for {grid.width:,} steps: the line is their mean, and the band goes from "
        "the smallest to the largest value. The table counts every step."
    )


def _twin(
    runs: Sequence[Run], rows: Sequence[Row], title: str, notes: Sequence[str], grid: Grid | None
) -> dict[str, Any]:
    return {
        "title": title,
        "explanation": EXPLANATION,
        "notes": list(notes),
        "table": [dataclasses.asdict(row) for row in rows],
        "runs": [
            {"name": run.name, "config": run.config, **_steps(run, grid), "layers": layer_grids(run)} for run in runs
        ],
    }


def _steps(run: Run, grid: Grid | None) -> dict[str, Any]:
    """Return all steps; with a grid, [first step, low, mean, high, steps not finite] of each bin per metric."""
    if grid is None:
        return {"steps": run.steps}
    bins = {name: [dataclasses.astuple(point) for point in grid.gather(*run.column(name))] for name in run.metrics}
    return {"bin_steps": grid.width, "bins": bins}


def _verdict(rows: Sequence[Row]) -> str:
    """Say of each run whether replay was on: the counters prove it, not the settings."""
    lines = [f"{row.name}: {_replayed(row)}." for row in rows]
    return verdict_box(None, lines[0] if len(lines) == 1 else "Was replay on?", lines if len(lines) > 1 else ())


def _replayed(row: Row) -> str:
    replayed, live = row.rows_replayed, row.rows_live
    if not row.steps:
        return "no step is finished yet"
    if replayed is None or live is None or not replayed + live:
        return "the run did not count replayed rows"
    if not replayed:
        return f"no row was replayed; all {number(live, 'count')} were routed live"
    if not live:
        return f"every row was replayed, {number(replayed, 'count')} in all"
    share = number(replayed / (replayed + live), "share")
    return f"{share} of the rows were replayed; {number(live, 'count')} were routed live"


def _table(rows: Sequence[Row]) -> str:
    body = []
    for line in LINES:
        meaning = f"<small>{html.escape(line.meaning)}</small>" if line.meaning else ""
        numbers = "".join(
            f"<td>{html.escape(text)}</td>" + (f'<td class="ratio">{html.escape(ratio)}</td>' if index else "")
            for index, (text, ratio) in enumerate(cells(line, rows))
        )
        part = ' class="part"' if line.field in GROUP_ENDS else ""
        body.append(f'<tr{part}><th scope="row">{html.escape(line.label)}{meaning}</th>{numbers}</tr>')
    foot = f'<p class="foot">× is the ratio to {html.escape(rows[0].name)}.</p>' if len(rows) > 1 else ""
    return scrolled(_head([row.name for row in rows], ratios=True), "".join(body)) + foot


def _head(names: Sequence[str], ratios: bool) -> str:
    columns = "".join(
        f'<th scope="col">{swatch(index)}<span class="name">{html.escape(name)}</span></th>'
        + ("<th></th>" if ratios and index else "")
        for index, name in enumerate(names)
    )
    return f"<thead><tr><th></th>{columns}</tr></thead>"


def _settings(runs: Sequence[Run]) -> str:
    differing = differing_settings(runs)
    if not differing:
        return ""
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f'<td class="text">{html.escape(text)}</td>' for text in texts)
        + "</tr>"
        for name, texts in differing
    )
    head = _head([run.name for run in runs], ratios=False)
    return "<h2>Settings in which the runs differ</h2>" + scrolled(head, body)
