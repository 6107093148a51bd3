"""The page of a file: turns, versions and rows are cut at the right tokens, and its size is bounded."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from router_replay import RouterSpec, Routes
from router_replay.batch import Sample
from router_replay.cli import main
from router_replay.recording import TrajectoryRecord, TrajectoryWriter
from router_replay.report import Lanes
from router_replay.report.trajectory_page import MOST_BANDS, MOST_TRAJECTORIES
from tests.report.test_report import data_of

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(0, 2))


def routes(rows: int, missing: tuple[int, ...] = (), versions: np.ndarray | None = None) -> Routes:
    rng = np.random.default_rng(rows)
    ids = np.argsort(rng.random((rows, 2, 8)), axis=2)[..., :2]
    captured = np.ones(rows, bool)
    captured[list(missing)] = False
    return Routes(ids, SPEC, captured=captured, versions=versions)


def test_two_turns_with_a_weight_change_and_a_missing_row() -> None:
    #       given given sampled sampled given sampled sampled sampled
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
    versions = np.array([0, 0, 4, 4, 0, 4, 5, 5])
    rows = routes(8, missing=(1, 7), versions=np.array([4, 4, 4, 4, 4, 4, 5, 5]))
    bands = Lanes("trajectory 0", rows, 0, mask, versions).bands
    assert bands["turns"] == [[0, 2, 0, 1], [2, 4, 1, 1], [4, 5, 0, 2], [5, 8, 1, 2]]
    assert bands["versions"] == [[2, 4, 4], [5, 6, 4], [6, 8, 5]]
    assert bands["rows"] == [
        [0, 1, True, 4, 1, False],
        [1, 2, False, 4, 1, False],
        [2, 3, True, 4, 1, True],
        [3, 5, True, 4, 2, False],  # the last token of a turn is forwarded by the prompt pass of the next one
        [5, 6, True, 4, 2, True],
        [6, 7, True, 5, 2, True],  # and the last token of all never
    ]


def test_rows_without_tokens_begin_where_they_begin() -> None:
    bands = Lanes("the file", routes(3), 5).bands
    assert bands == {"name": "the file", "turns": [], "versions": [], "rows": [[5, 8, True, None, 0, False]]}
    assert Lanes("none", None).bands["rows"] == []


def test_a_trajectory_that_begins_with_sampled_tokens() -> None:
    bands = Lanes("a", None, 0, np.array([1, 1, 0], bool), np.zeros(3, np.int64)).bands
    assert bands["turns"] == [[0, 2, 1, 1], [2, 3, 0, 2]]
    one = Lanes("one", routes(1), 0, np.ones(1, bool), np.zeros(1, np.int64)).bands
    assert one["rows"] == []


def write(path: pathlib.Path, count: int, tokens: int, turn: int) -> None:
    mask = np.arange(tokens) % turn >= turn // 2
    sample = Sample(np.arange(tokens), np.where(mask, -1.0, 0).astype(np.float32), mask, routes(tokens), versions=3)
    with TrajectoryWriter(path) as writer:
        writer.write([TrajectoryRecord(sample, episode=number) for number in range(count)])


def test_the_command_writes_the_page(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "routes", tmp_path / "page.html"
    write(file, 3, 40, 10)
    assert main(["inspect", str(file), "--json", "--report", str(out)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["sequences"] == 3  # stdout is the JSON and nothing else
    assert str(out) in printed.err
    twin = json.loads(out.with_suffix(".json").read_text())
    assert twin["charts"] == data_of(out.read_text())["charts"]
    every, one, load = twin["charts"]
    assert (every["drawing"], one["drawing"], one["of"], load["drawing"]) == ("trajectories", "trajectory", 0, "grid")
    assert [len(found["turns"]) for found in every["trajectories"]] == [8, 8, 8]
    assert np.sum(load["values"]) == pytest.approx(2 * 8, rel=1e-4)  # relative to the even load
    assert "No row is missing." in out.read_text()


@pytest.mark.parametrize(("count", "tokens", "turn"), [(1000, 100, 10), (2, 50_000, 4)])
def test_the_page_of_100k_tokens_is_small(tmp_path: pathlib.Path, count: int, tokens: int, turn: int) -> None:
    file, out = tmp_path / "routes", tmp_path / "page.html"
    write(file, count, tokens, turn)
    assert main(["inspect", str(file), "--report", str(out)]) == 0
    assert out.stat().st_size < 5_000_000
    twin = json.loads(out.with_suffix(".json").read_text())
    shown = twin["charts"][0]["trajectories"]
    assert 1 <= len(shown) <= MOST_TRAJECTORIES
    assert max(len(one["turns"]) for one in shown) <= MOST_BANDS
    assert f"{count - len(shown):,} more are left out" in twin["notes"][0]


def test_a_page_that_cannot_be_written_is_refused_before_the_file_is_read(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "routes", 1, 4, 2)
    assert main(["inspect", str(tmp_path / "routes"), "--report", str(tmp_path / "page.json")]) == 1
    assert "use .html" in capsys.readouterr().err
