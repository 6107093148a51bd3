"""Runs that others wrote, damaged or were very long: the report says what is wrong and where, or shows it sensibly."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from router_replay.cli import main
from router_replay.errors import MeasureError
from router_replay.number_format import Kind, number
from router_replay.report import Run, as_text, comparison, read_metrics, write_report
from router_replay.report.bins import BINS, MOST_STEPS, Grid
from router_replay.report.curves import CHARTS
from tests.report.test_report import Tags, data_of, full_line, make_run, page_of, written_by_us

DEEP = "[" * 100_000


def written(folder: pathlib.Path, text: str, config: str | None = None) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(config, encoding="utf-8")
    return Run(folder.name, folder)


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity", "null"])
def test_what_no_float_holds_is_not_finite(tmp_path: pathlib.Path, value: str) -> None:
    text = f'{{"step": 0, "reward": 1.0}}\n{{"step": 1, "reward": {value}, "routes/replayed": {value}}}\n'
    run = written(tmp_path / "a", text)
    assert read_metrics(run.folder)[1]["reward"] is None
    page, twin = page_of([run])
    assert twin["table"][0]["not_finite"] == {"reward": 1, "routes/replayed": 1}
    assert twin["table"][0]["reward_last"] == 1.0
    curves = {chart["metric"]: chart["curves"][0] for chart in data_of(page)["charts"]}
    assert curves["reward"] == {"m": [1.0, None], "last": None, "bad": [0, 1]}
    assert "reward in 1 of 2" in as_text(comparison([run]))


@pytest.mark.parametrize(
    "value", ["1e308", "-1.7e308", "1" + "0" * 300, "1e290", "-1e290", "1e15", "123456789012345678"]
)
def test_huge_values_break_neither_table_nor_charts(tmp_path: pathlib.Path, value: str) -> None:
    names = [chart.metric for chart in CHARTS] + ["routes/replayed", "routes/live"]
    line = ", ".join(f'"{name}": {value}' for name in names)
    other = ", ".join(f'"{name}": -{value}'.replace("--", "") for name in names)
    run = written(tmp_path / "a", f'{{"step": 0, {line}}}\n{{"step": 1, {line}}}\n{{"step": 2, {other}}}\n')
    for runs in ([run], [make_run(tmp_path, "b", [full_line(0, 1e-3)]), run]):
        page, _ = page_of(runs)
        text = as_text(comparison(runs))
        assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", written_by_us(page) + text)
        shown, _, _ = page.partition('<script type="application/json"')
        assert not re.search(r"[\d,]{25}", shown + text)  # no number of hundreds of digits


@pytest.mark.parametrize("kind", ["plain", "small", "share", "count", "seconds", "ratio"])
@pytest.mark.parametrize("value", [1e290, -1e290, 10**300, 1e15, 2.5e7], ids="{:.1e}".format)
def test_every_number_is_short(kind: Kind, value: float) -> None:
    assert len(number(value, kind)) <= 21


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (DEEP, "a/metrics.jsonl:2 is not JSON"),
        ('{"step": 1, "x": ' + DEEP, "a/metrics.jsonl:2 is not JSON"),
        ('{"step": 1, "x": ' + "[" * 500 + "]" * 500 + "}", "metrics.jsonl:2: x must be a number or null, got a list"),
        ('{"step": 1, "x": "' + "y" * 10_000 + '"}', r"metrics.jsonl:2: x must be a number or null, got 'y{79}$"),
        ('{"step": 1, "x": ' + "1" * 10_000 + "}", "metrics.jsonl:2 is not JSON .*digits"),
        ('{"step": 1e999}', "metrics.jsonl:2: expected a JSON object whose step is an integer of at most"),
        ('{"step": 1' + "0" * 400 + "}", "metrics.jsonl:2: expected a JSON object whose step is an integer of at most"),
        ('{"step": true}', "metrics.jsonl:2: expected a JSON object whose step is an integer of at most"),
        ('{"step": 1.0}', "metrics.jsonl:2: expected a JSON object whose step is an integer of at most"),
        ("[1]", "metrics.jsonl:2: expected a JSON object"),
        ("", "metrics.jsonl:2 is not JSON"),
        ("\udcff", "metrics.jsonl:2 is not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: pathlib.Path, line: str, message: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    text = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'
    (folder / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MeasureError, match=message) as caught:
        write_report([Run("a", folder)], tmp_path / "page.html", "title")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "config", [DEEP, '{"a":' * 300 + "1" + "}" * 300, '{"a": ' + "[" * 300 + "]" * 300 + "}", "[1]", "{", '"\xff']
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: pathlib.Path, config: str) -> None:
    run = written(tmp_path / "a", '{"step": 0}\n', config)
    with pytest.raises(MeasureError, match=r"a/config\.json .*remove it to make the report without settings"):
        write_report([run], tmp_path / "page.html", "title")


def test_odd_values_of_a_config_are_shown_as_they_stand(tmp_path: pathlib.Path) -> None:
    one = written(tmp_path / "a", '{"step": 0}\n', '{"lr": 1e999, "kl": NaN, "s": "\\ud800", "t": "<u>"}')
    two = written(tmp_path / "b", '{"step": 0}\n', '{"lr": 1, "kl": 2, "s": "' + "x" * 10_000 + '", "t": "\\u001b[2J"}')
    page, twin = page_of([one, two])
    rows = {row[0]: row[1:] for row in Tags(page).rows}
    assert rows["lr"] == ["1e999", "1"]
    assert rows["kl"] == ["NaN", "2"]
    assert rows["s"] == ["\\ud800", "x" * 300 + "…"]
    assert twin["runs"][0]["config"]["s"] == "\ud800"
    assert "<u>" not in written_by_us(page)


def test_names_cannot_command_a_terminal(tmp_path: pathlib.Path) -> None:
    run = written(tmp_path / "a", '{"step": 0, "\\u001b[2J": null}\n')
    text = as_text(comparison([Run("evil\x1b[31m\udc80\nname", run.folder)]))
    assert "\x1b" not in text
    assert "evil\\x1b[31m\\udc80\\nname" in text
    text.encode("utf-8")


def test_the_command_prints_a_message_and_no_traceback(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "<script>", f'{{"step": 0}}\n{DEEP}\n')
    assert main(["report", str(tmp_path / "<script>"), "--out", str(tmp_path / "page.html")]) == 1
    assert "metrics.jsonl:2 is not JSON" in capsys.readouterr().err


# -- long runs --------------------------------------------------------------------------------------


def long_run(folder: pathlib.Path, steps: int, changes: dict[int, dict[str, Any]]) -> Run:
    common = json.dumps(full_line(0, 1e-3) | {f"other/{number}": 0.123456789 for number in range(10)})[1:-1]
    lines = [f'{{"step": {step}, {common}}}' for step in range(steps)]
    for step, values in changes.items():
        lines[step] = json.dumps({**json.loads(lines[step]), **values})
    return written(folder, "\n".join(lines) + "\n")


def test_a_long_run_makes_a_small_page_on_which_every_spike_is_seen(tmp_path: pathlib.Path) -> None:
    spikes = {31_234: {"grad_norm": 900.0}, 60_001: {"mismatch/k3": None}, 77_777: {"reward": -5.0}}
    run = long_run(tmp_path / "long", 100_000, spikes)
    page, twin = page_of([run])
    pages = tmp_path / "pages"
    assert sum(path.stat().st_size for path in pages.iterdir()) < 3_000_000
    assert any("stands for 200 steps" in note for note in twin["notes"])
    bins = twin["runs"][0]["bins"]
    assert [point for point in bins["grad_norm"] if point[3] > 1] == [[31_200, 1.0, 1.0 + 899 / 200, 900.0, 0]]
    assert [point for point in bins["reward"] if point[1] < 0] == [[77_600, -5.0, -5 / 200, 0.0, 0]]
    assert [point for point in bins["mismatch/k3"] if point[4]] == [[60_000, 1e-3, 1e-3, 1e-3, 1]]
    curves = {chart["metric"]: chart["curves"][0] for chart in data_of(page)["charts"]}
    assert set(curves) == set(bins)
    assert max(len(curve["m"]) for curve in curves.values()) <= BINS
    norm = curves["grad_norm"]
    at = norm["hi"].index(900.0)
    assert (norm["lo"][at], norm["m"][at], data_of(page)["runs"][0]["x"][at]) == (1.0, 5.495, 31_200)
    assert {name for name, curve in curves.items() if "lo" in curve} == {"reward", "grad_norm"}  # they alone vary


def test_the_table_of_a_long_run_counts_every_step(tmp_path: pathlib.Path) -> None:
    [row] = comparison([long_run(tmp_path / "long", 2_000, {1_999: {"reward": 3.0}})])
    assert (row.steps, row.rows_replayed, row.reward_last) == (2_000, 200_000, 1.0)


def test_runs_up_to_a_length_are_shown_step_by_step(tmp_path: pathlib.Path) -> None:
    _, twin = page_of([long_run(tmp_path / "a", MOST_STEPS, {})])
    assert len(twin["runs"][0]["steps"]) == MOST_STEPS


def test_bins_of_all_runs_line_up_and_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    steps = rng.permutation(np.arange(-3, 5_000))
    values = rng.normal(size=len(steps))
    values[rng.random(len(steps)) < 0.5] = np.nan
    values[(steps >= 100) & (steps < 200)] = np.nan
    grid = Grid.of([steps.tolist(), [7], []])
    assert grid is not None
    points = grid.gather(steps, values)
    assert len(points) <= BINS
    for point in points:
        inside = values[(steps >= point.step) & (steps < point.step + grid.width)]
        finite = inside[~np.isnan(inside)]
        assert point.not_finite == np.isnan(inside).sum()
        if len(finite):
            assert (point.low, point.high) == (finite.min(), finite.max())
            assert point.mean == pytest.approx(finite.mean())
        else:
            assert point.mean is None
    assert [point.step for point in grid.gather(np.array([7]), np.array([1.0]))] == [
        max(point.step for point in points if point.step <= 7)
    ]
