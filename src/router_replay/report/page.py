"""Write a self-contained page about a few runs, and a JSON file with the same numbers.

write_report([Run("off", off), Run("r3", r3)], Path("out/report.html"), "Replay off and on", ["Seeds are equal."])
"""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from router_replay.errors import ConfigError
from router_replay.report.bins import Grid, Point
from router_replay.report.charts import COLOURS, Chart, Series, figure
from router_replay.report.runs import LINES, Row, Run, cells, comparison, differing_settings, remarks
from router_replay.report.style import COLOUR_RULES, SCRIPT, STYLE

EXPLANATION = (
    "In reinforcement learning, an engine samples tokens and the trainer then computes their probabilities again. "
    "In a mixture-of-experts model the two may send a token to different experts, and then the trainer learns from "
    "probabilities with which no token was sampled. Replay makes the trainer use the engine's experts. This page shows "
    "how far engine and trainer were apart, what the runs learned, and what they cost."
)
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
# With this policy the browser refuses to load any other resource.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
GROUP_ENDS = ("reward_last", "agreement_mean")


def write_report(runs: Sequence[Run], out: pathlib.Path, title: str, notes: Sequence[str] = ()) -> None:
    """Write the page to `out`, and the JSON file to the same path with the suffix .json.

    `runs` are compared in the order given; ratios are relative to the first one. `title` is the heading of the page.
    `notes` are included in both files, followed by remarks on the comparison. Raise ConfigError if there are no runs,
    or if `out` ends in .json.
    """
    if not runs:
        raise ConfigError("a report needs one run or more, got none: give the output folder of a run")
    if out.suffix == ".json":
        raise ConfigError(f"the page cannot have the name {out.name}: the JSON file gets this name; use .html")
    rows = comparison(runs)
    grid = Grid.of([[line["step"] for line in run.steps] for run in runs])
    notes = [*notes, *remarks(rows), *([_binned(grid)] if grid else [])]
    twin = json.dumps(_twin(runs, rows, title, notes, grid), indent=1, allow_nan=False, ensure_ascii=False)
    page = _page(runs, rows, title, notes, grid)
    out.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate (from a damaged name) cannot be encoded as UTF-8; its escape is valid in JSON.
    out.with_suffix(".json").write_text(twin + "\n", encoding="utf-8", errors="backslashreplace")
    out.write_text(page, encoding="utf-8", errors="backslashreplace")


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
        "runs": [{"name": run.name, "config": run.config, **_steps(run, grid)} for run in runs],
    }


def _steps(run: Run, grid: Grid | None) -> dict[str, Any]:
    """Return all steps; with a grid, [first step, low, mean, high, steps not finite] of each bin per metric."""
    if grid is None:
        return {"steps": run.steps}
    bins = {name: [dataclasses.astuple(point) for point in grid.gather(*run.column(name))] for name in run.metrics}
    return {"bin_steps": grid.width, "bins": bins}


def _series(run: Run, metric: str, grid: Grid | None) -> Series:
    steps, values = run.column(metric)
    last = Point.of(int(steps[-1]), float(values[-1])).mean if len(steps) else None
    if grid is not None:
        return Series(run.name, grid.gather(steps, values), last)
    return Series(run.name, [Point.of(*point) for point in zip(steps.tolist(), values.tolist(), strict=True)], last)


def _page(runs: Sequence[Run], rows: Sequence[Row], title: str, notes: Sequence[str], grid: Grid | None) -> str:
    colours = "".join(COLOUR_RULES.format(index=index) for index in range(COLOURS))
    figures = "\n".join(figure(chart, [_series(run, chart.metric, grid) for run in runs]) for chart in CHARTS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{html.escape(title)}</title>
<style>{STYLE}{colours}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(EXPLANATION)}</p>
{_table(rows)}
{_notes(notes)}
<h2>Step by step</h2>
<div class="charts">
{figures}
</div>
{_settings(runs)}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


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
    head = _head([row.name for row in rows], ratios=True)
    return _scrolled(head, "".join(body)) + foot


def _head(names: Sequence[str], ratios: bool) -> str:
    columns = "".join(
        f'<th scope="col"><i class="swatch c{index % COLOURS}"></i><span class="name">{html.escape(name)}</span></th>'
        + ("<th></th>" if ratios and index else "")
        for index, name in enumerate(names)
    )
    return f"<thead><tr><th></th>{columns}</tr></thead>"


def _scrolled(head: str, body: str) -> str:
    """Return a table that scrolls separately if the window is too narrow for all runs."""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if notes else ""


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
    return "<h2>Settings in which the runs differ</h2>" + _scrolled(head, body)
