"""The page: self-contained, escaped, and with the same numbers as its JSON twin and the printed table."""

from __future__ import annotations

import argparse
import html.parser
import json
import math
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from router_replay.cli import report as report_command
from router_replay.errors import ConfigError, MeasureError
from router_replay.report import Run, as_text, comparison, write_report
from router_replay.report.curves import CHARTS
from router_replay.report.library import library_script
from router_replay.report.runs import LINES, cells


def make_run(folder: pathlib.Path, name: str, lines: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Run:
    run = folder / name.strip("</>")
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **line}) + "\n" for i, line in enumerate(lines)))
    if config is not None:
        (run / "config.json").write_text(json.dumps(config))
    return Run(name, run)


def full_line(step: int, k3: float) -> dict[str, float]:
    return {
        "reward": 0.1 * step,
        "mismatch/k3": k3 * (step + 1),
        "mismatch/extreme_tau2": 1e-3,
        "routes/agreement": 0.883,
        "routes/replayed": 100,
        "routes/live": 5,
        "grad_norm": 1.0,
        "entropy": 0.5,
        "seconds/step": 10.0 + step,
        "tokens_per_second": 800.0,
        "trainer/tokens_per_second": 1600.0,
        "trainer/peak_share": 0.07,
        "memory/peak_gib": 2.5,
        **{f"seconds/{phase}": 0.5 for phase in ("rollout", "score", "update", "sync")},
    }


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> list[Run]:
    off = make_run(
        tmp_path, "off", [full_line(step, 2e-3) for step in range(5)], {"replay": "off", "output": "a", "seed": 0}
    )
    r3 = make_run(
        tmp_path, "r3", [full_line(step, 2.5e-4) for step in range(5)], {"replay": "r3", "output": "b", "seed": 0}
    )
    return [off, r3]


def page_of(runs: list[Run], notes: tuple[str, ...] = (), title: str = "A title") -> tuple[str, dict[str, Any]]:
    out = runs[0].folder.parent / "pages" / "report.html"
    write_report(runs, out, title, notes)
    return out.read_text(), json.loads(out.with_suffix(".json").read_text())


def written_by_us(page: str) -> str:
    """The page without the library and the scripts: the text and the data that change with the runs."""
    head, _, rest = page.partition('<script type="module">')
    assert rest.startswith(library_script())
    return head


def data_of(page: str) -> dict[str, Any]:
    """What the page's scripts draw."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


class Tags(html.parser.HTMLParser):
    """Every tag with its attributes, and the text of the tables, cell by cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, text: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += text


def test_the_numbers_of_the_comparison(runs: list[Run]) -> None:
    off, r3 = comparison(runs)
    assert (off.steps, off.reward_first) == (5, 0.0)
    assert off.reward_last == pytest.approx((0.2 + 0.3 + 0.4) / 3)
    assert off.k3_first == 2e-3
    assert off.k3_mean == pytest.approx(6e-3)
    assert (off.rows_replayed, off.rows_live, off.seconds_per_step) == (500, 25, 12.0)
    assert off.ratios == dict.fromkeys(off.ratios, 1.0)
    assert r3.ratios["k3_first"] == pytest.approx(0.125)
    assert r3.ratios["k3_mean"] == pytest.approx(0.125)
    assert r3.ratios["seconds_per_step"] == 1.0


def test_the_twin_has_the_numbers_of_the_table(runs: list[Run]) -> None:
    page, twin = page_of(runs, notes=("Seeds are equal.",))
    rows = comparison(runs)
    assert twin["table"] == [json.loads(json.dumps(vars(row))) for row in rows]
    assert [run["steps"] for run in twin["runs"]] == [run.steps for run in runs]
    assert twin["notes"] == ["Seeds are equal."]
    assert "<li>Seeds are equal.</li>" in page
    printed = {row[0]: row[1:] for row in Tags(page).rows}
    for line in LINES:
        (first, _), (second, ratio) = cells(line, rows)
        assert printed[line.label + line.meaning] == [first, second, ratio]


def test_the_text_has_the_table_too(runs: list[Run]) -> None:
    lines = as_text(comparison(runs)).splitlines()
    assert lines[0].split() == ["off", "r3"]
    k3 = next(line for line in lines if line.startswith("k3, first step"))
    assert k3.split()[-3:] == ["2.00e-3", "2.50e-4", "0.12×"]


def test_the_page_refers_to_nothing_outside(runs: list[Run]) -> None:
    page, _ = page_of(runs)
    ours = page.replace(library_script(), "")
    assert "http://" not in ours
    assert "https://" not in ours
    assert "url(" not in ours
    assert "@import" not in ours
    fetching = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}
    parsed = Tags(ours)
    assert [(tag, names) for tag, names in parsed.tags if fetching & names.keys()] == []
    assert not {tag for tag, _ in parsed.tags} & {"link", "img", "iframe", "object", "embed"}
    policies = [names["content"] for tag, names in parsed.tags if tag == "meta" and "http-equiv" in names]
    assert policies[0].startswith("default-src 'none'")


def test_the_library_names_no_address_to_load_from() -> None:
    """Names of XML and of schemas are no addresses; the policy would refuse any other too."""
    hosts = set(re.findall(r"https?://([\w.-]+)", library_script()))
    assert hosts <= {"www.w3.org", "vega.github.io", "github.com"}


def test_every_metric_has_a_chart_with_every_run(tmp_path: pathlib.Path) -> None:
    lines = [full_line(step, 1e-3) | {"async/ready": step, "new/metric": 0.5 * step} for step in range(5)]
    runs = [make_run(tmp_path, "off", lines), make_run(tmp_path, "r3", lines[:3])]
    charts = data_of(page_of(runs)[0])["charts"]
    first = [chart.metric for chart in CHARTS if chart.metric in lines[0]]
    assert [chart["metric"] for chart in charts[: len(first)]] == first
    assert {chart["metric"] for chart in charts} == set(lines[0])
    drawn = {chart["metric"]: [curve["m"] for curve in chart["curves"]] for chart in charts}
    for name, (off, r3) in drawn.items():
        assert off == [pytest.approx(line[name], rel=1e-5) for line in lines]
        assert r3 == off[:3]
    assert all(chart["series"] == ["off", "r3"] for chart in charts)


def test_a_curve_says_its_steps_only_where_they_are_not_all(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path, "a", [{"reward": 1.0}, {"reward": 2.0, "evaluation/reward": 0.5}, {"reward": 3.0}])
    data = data_of(page_of([run])[0])
    curves = {chart["metric"]: chart["curves"][0] for chart in data["charts"]}
    assert data["runs"] == [{"name": "a", "x": [0, 1, 2]}]
    assert curves["reward"] == {"m": [1.0, 2.0, 3.0], "last": 3.0}
    assert curves["evaluation/reward"] == {"m": [0.5], "last": 0.5, "x": [1]}


def test_metrics_of_each_layer_become_one_heat_map(tmp_path: pathlib.Path) -> None:
    lines: list[dict[str, Any]] = [
        {"reward": 0.0, "routing/layers": [1, 2, 10], "routing/load/layers": [1.0, 2.0 + step / 4, step]}
        for step in range(3)
    ]
    lines[1]["routing/load/layers"] = [1.0, None]
    runs = [make_run(tmp_path, "a", lines), make_run(tmp_path, "b", [{"reward": 0.0}])]
    page, twin = page_of(runs)
    curves, heat = data_of(page)["charts"]
    grid = {"edges": [0, 1, 2, 3], "rows": [1, 2, 10], "values": [[1.0, 1.0, 1.0], [2.0, None, 2.5], [0.0, None, 2.0]]}
    assert (curves["metric"], heat["metric"], heat["drawing"]) == ("reward", "routing/load/layers", "grid")
    assert heat["grids"] == [grid]  # of the one run that has it
    assert [run["layers"] for run in twin["runs"]] == [{"routing/load/layers": grid}, {}]
    assert twin["runs"][0]["steps"][0] == {"step": 0, "reward": 0.0}


def test_a_long_run_has_heat_maps_of_few_columns(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path, "a", [{"routes/agreement/layers": [step, 1.0]} for step in range(1050)])
    [chart] = data_of(page_of([run])[0])["charts"]
    [grid] = chart["grids"]
    assert (grid["rows"], len(grid["edges"]), grid["edges"][:2]) == ([0, 1], 97, [0, 11])
    assert grid["values"][0][:2] == [5.0, 16.0]


def test_the_verdict_says_whether_replay_was_on(tmp_path: pathlib.Path) -> None:
    counts = {"off": (0, 40), "r3": (40, 0), "part": (30, 10)}
    runs = [
        make_run(tmp_path, name, [{"routes/replayed": replayed, "routes/live": live}])
        for name, (replayed, live) in counts.items()
    ]
    page, _ = page_of(runs)
    assert "off: no row was replayed; all 40 were routed live." in page
    assert "r3: every row was replayed, 40 in all." in page
    assert "part: 75.0 % of the rows were replayed; 10 were routed live." in page


def test_text_is_escaped(tmp_path: pathlib.Path) -> None:
    evil = "<script>"
    run = make_run(tmp_path, evil, [full_line(0, 1e-3)], {"replay": "<b>&"})
    other = make_run(tmp_path, '"onload="x', [full_line(0, 1e-3)], {"replay": "</style>"})
    page, twin = page_of([run, other], notes=("<i>note</i>",), title="</title><u>")
    ours = page.replace(library_script(), "")
    assert ours.count("<script") == 3  # counted in the text: a parser takes what follows an unescaped one for its code
    assert "<u>" not in ours
    assert "&lt;script&gt;" in page
    assert "&lt;i&gt;note" in page
    assert "&lt;b&gt;&amp;" in page
    assert not any("onload" in names for _, names in Tags(ours).tags)
    assert data_of(page)["runs"][0]["name"] == evil
    assert twin["table"][0]["name"] == evil


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{}],
        [{"reward": 1.0}],
        [{"reward": None, "mismatch/k3": None}],
        [{"mismatch/k3": 0.0, "reward": -1.0}, {"mismatch/k3": 0.0, "reward": -1.0}],
        [{"mismatch/k3": 0.0}, {"mismatch/k3": 1e-9}, {"mismatch/k3": 1e6}],
        [{"mismatch/k3": 1e-3, "grad_norm": 1e300}, {"grad_norm": 1e-300}],
        [{"reward": 5e-324}, {"reward": 0}, {"mismatch/k3": 5e-324}],
        [{"mismatch/k3": 1e-3, "reward": 0.1 + 0.2}, {"mismatch/k3": 5e-324, "reward": 0.3}],
    ],
)
def test_a_run_with_little_does_not_break(tmp_path: pathlib.Path, runs: list[Run], lines: list[dict[str, Any]]) -> None:
    little = make_run(tmp_path, "little", lines)
    for chosen in ([little], [little, *runs], [*runs, little]):
        page, twin = page_of(chosen)
        assert as_text(comparison(chosen))
        assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", written_by_us(page))
        assert len(twin["table"]) == len(chosen)


def test_what_was_not_finite_is_said_and_in_no_mean(tmp_path: pathlib.Path) -> None:
    lines = [{"mismatch/k3": 1e-3}, {"mismatch/k3": None}, {"mismatch/k3": 3e-3}]
    run = make_run(tmp_path, "off", lines)
    page, twin = page_of([run])
    assert math.isclose(twin["table"][0]["k3_mean"], 2e-3)
    assert any("mismatch/k3 in 1 of 3" in note for note in twin["notes"])
    [chart] = data_of(page)["charts"]
    assert chart["curves"] == [{"m": [0.001, None, 0.003], "last": 0.003, "bad": [0, 1, 0]}]


def test_runs_of_other_lengths_are_said(tmp_path: pathlib.Path, runs: list[Run]) -> None:
    short = make_run(tmp_path, "short", [full_line(0, 1e-3)])
    _, twin = page_of([*runs, short])
    assert any("different numbers of steps" in note for note in twin["notes"])
    assert page_of(runs)[1]["notes"] == []


def test_only_settings_that_differ_are_shown(runs: list[Run]) -> None:
    rows = Tags(page_of(runs)[0]).rows
    assert ["replay", "off", "r3"] in rows
    assert not any(row[0] in ("seed", "output") for row in rows)


def test_what_cannot_be_reported_is_refused(tmp_path: pathlib.Path, runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match=r"the page cannot have the name page\.json.*use \.html"):
        write_report(runs, tmp_path / "page.json", "title")
    with pytest.raises(ConfigError, match="one run or more"):
        write_report([], tmp_path / "page.html", "title")
    with pytest.raises(MeasureError, match=r"no metrics\.jsonl"):
        write_report([Run("x", tmp_path / "x")], tmp_path / "page.html", "title")
    assert not (tmp_path / "page.html").exists()


def test_the_command(tmp_path: pathlib.Path, runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    report_command.add(parser.add_subparsers())
    out = tmp_path / "page.html"
    chosen = parser.parse_args(["report", str(runs[0].folder), f"mine={runs[1].folder}", "--out", str(out)])
    assert chosen.run(chosen) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["off", "mine"]
    assert [row["name"] for row in json.loads((tmp_path / "page.json").read_text())["table"]] == ["off", "mine"]


def test_without_the_library_the_error_says_what_to_install(
    runs: list[Run], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_script.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r'needs vl-convert-python: pip install "router-replay\[report\]"'):
        write_report(runs, tmp_path / "page.html", "title")
    assert not (tmp_path / "page.html").exists()


def test_reporting_needs_no_torch_and_no_training_package() -> None:
    code = "import sys, router_replay.report; print(sorted({'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
