"""The page of a verdict: its data are right, what is large is put into bins, and its size is bounded."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from router_replay.errors import ConfigError
from router_replay.report import Seen, write_verdict
from router_replay.report.library import library_script
from router_replay.report.verdict_page import (
    FARTHEST,
    MOST_CELLS,
    MOST_POINTS,
    RATIO_BINS,
    load_figure,
    verdict_figures,
)
from tests.report.test_report import Tags, data_of

VERDICT: dict[str, Any] = {
    "source": "engine <b>",
    "finding": None,
    "expected": 0.25,
    "live": {"k3": 1e-3, "extreme": 0.0, "abs_mean": 0.02},
    "replayed": {"k3": 1e-4, "extreme": 0.0, "abs_mean": 0.01},
    "notes": ["few rows"],
}


def made_up(sequences: int, length: int, layers: int, experts: int = 8, seed: int = 0) -> Seen:
    rng = np.random.default_rng(seed)
    count = sequences * length
    engine = -rng.exponential(1.0, count)
    return Seen(
        tuple(range(layers)),
        np.repeat(np.arange(sequences), length),
        np.tile(np.arange(length), sequences),
        rng.random((count, layers)) < 0.1,
        rng.integers(0, 50, (layers, experts)),
        engine,
        engine + rng.normal(0, 0.2, count),
        engine + rng.normal(0, 0.05, count),
        np.repeat(np.arange(sequences), length),
        np.tile(np.arange(length), sequences),
    )


def chart_named(seen: Seen, drawing: str) -> dict[str, Any]:
    return next(figure.as_json() for figure in verdict_figures(seen, 0.25) if figure.drawing == drawing)


def test_the_heat_map_has_the_share_of_each_layer_and_position() -> None:
    differs = np.array([[True, False], [False, False], [True, True], [False, True]])
    seen = Seen((3, 7), np.array([0, 0, 1, 1]), np.array([0, 2, 0, 2]), differs, np.ones((2, 4), np.int64))
    chart = chart_named(seen, "grid")
    assert (chart["rows"], chart["edges"], chart["counts"]) == ([3, 7], [0, 1, 2, 3], [2, 0, 2])
    assert chart["values"] == [[1.0, None, 0.0], [0.5, None, 0.5]]
    bars = chart_named(seen, "bars")
    assert (bars["rows"], bars["values"], bars["expected"]) == ([3, 7], [0.5, 0.5], 0.25)


@pytest.mark.parametrize("layers", [1, 48, 94])
def test_bins_keep_the_shares_and_bound_the_cells(layers: int) -> None:
    seen = made_up(3, 5000, layers)
    chart = chart_named(seen, "grid")
    counts, values = np.array(chart["counts"]), np.array(chart["values"])
    assert values.size <= MOST_CELLS
    assert counts.sum() == len(seen.position)
    assert (values * counts).sum(axis=1) / counts.sum() == pytest.approx(seen.differs.mean(axis=0), abs=1e-5)
    assert chart["edges"][-1] >= 5000


def test_few_tokens_are_drawn_one_by_one_with_their_place() -> None:
    seen = made_up(4, 10, 2)
    chart = chart_named(seen, "scatter")
    assert chart["series"] == ["live", "replayed"]
    for group, own in zip(chart["groups"], (seen.live, seen.replayed), strict=True):
        assert group["x"] == pytest.approx(seen.engine, rel=1e-5)
        assert group["y"] == pytest.approx(own, rel=1e-5)
        assert (group["sequence"][-1], group["position"][-1]) == (3, 9)
        assert "n" not in group


def test_of_many_tokens_every_one_is_counted_and_the_farthest_keep_their_place() -> None:
    seen = made_up(1, MOST_POINTS + 1, 1)
    assert seen.engine is not None
    assert seen.live is not None
    live = np.array(seen.live)
    live[1234] = seen.engine[1234] - 9
    group = chart_named(dataclasses.replace(seen, live=live), "scatter")["groups"][0]
    assert sum(group["n"]) == MOST_POINTS + 1
    assert group["n"][:FARTHEST] == [1] * FARTHEST
    at = group["position"].index(1234)
    assert group["y"][at] == pytest.approx(live[1234], rel=1e-5)
    assert len({len(column) for column in group.values()}) == 1


def test_the_histogram_counts_every_token_once() -> None:
    seen = made_up(1, 3000, 1)
    assert seen.engine is not None
    assert seen.live is not None
    far = np.array(seen.live)
    far[0] = seen.engine[0] + 30  # beyond the last bar
    chart = chart_named(dataclasses.replace(seen, live=far), "histogram")
    assert [sum(counts) for counts in chart["counts"]] == [3000, 3000]
    assert chart["counts"][0][-1] == 1
    assert len(chart["edges"]) == RATIO_BINS + 1
    assert chart["edges"][-1] == pytest.approx(math.log(64), rel=1e-5)
    assert chart["taus"] == [2.0, 5.0]


def test_the_load_is_relative_to_the_even_one() -> None:
    chart = load_figure([5], np.array([[0, 1, 2, 5]])).as_json()
    assert (chart["rows"], chart["edges"], chart["values"]) == ([5], [0, 1, 2, 3, 4], [[0.0, 0.5, 1.0, 2.5]])
    many = load_figure(range(60), np.ones((60, 512), np.int64)).as_json()
    assert np.array(many["values"]).size <= MOST_CELLS
    assert np.unique(many["values"]).tolist() == [1.0]


def test_rows_that_cannot_be_replayed_show_the_live_pass_alone() -> None:
    seen = dataclasses.replace(made_up(2, 10, 2), replayed=None)
    assert chart_named(seen, "scatter")["series"] == ["live"]
    assert len(chart_named(seen, "histogram")["counts"]) == 1
    bare = dataclasses.replace(seen, engine=None, live=None)
    assert [figure.drawing for figure in verdict_figures(bare, None)] == ["grid", "bars", "grid"]


def test_a_page_of_100k_tokens_is_small_and_has_the_data_of_its_twin(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "page.html"
    write_verdict(VERDICT, ["line <i>"], made_up(50, 2000, 48, 128), out)
    assert out.stat().st_size < 2_000_000
    assert out.with_suffix(".json").stat().st_size < 2_000_000
    twin = json.loads(out.with_suffix(".json").read_text())
    page = out.read_text()
    assert data_of(page)["charts"] == twin["charts"]
    assert twin["verdict"] == VERDICT


def test_the_verdict_stands_on_top_and_text_is_escaped(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "page.html"
    seen = made_up(2, 10, 2)
    write_verdict(VERDICT, ["printed <i>"], seen, out)
    good = out.read_text().replace(library_script(), "")
    assert 'class="verdict good"' in good
    assert "engine &lt;b&gt;" in good
    assert "printed &lt;i&gt;" in good
    rows = {row[0]: row[1:] for row in Tags(good).rows}
    assert rows["k3KL estimate, engine to trainer"] == ["1.00e-3", "1.00e-4"]
    fault = {"fault": "shift", "cause": "a row was lost", "detail": "3 of 4"}
    write_verdict(VERDICT | {"finding": fault, "replayed": None}, [], dataclasses.replace(seen, replayed=None), out)
    bad = out.read_text()
    assert 'class="verdict bad"' in bad
    assert "Fault shift: a row was lost." in bad
    with pytest.raises(ConfigError, match=r"use \.html"):
        write_verdict(VERDICT, [], seen, tmp_path / "page.json")
