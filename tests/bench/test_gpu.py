"""What `make bench-gpu` says of benchmarks that keep a goal, miss it, fail, or take too long."""

from __future__ import annotations

import pathlib
import time

import pytest

from bench.gpu import BENCHMARKS, Benchmark, main


def test_each_benchmark_has_its_verdict_and_its_log(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        Benchmark("good", "timeit -n 1 -r 1 pass", 1),
        Benchmark("bad", "bench.gpu --only nothing", 1),  # argparse ends with status 2
        Benchmark("absent", "timeit pass", 1, needs="no_such_package"),
        Benchmark("dear", "timeit pass", 10_000),
    ]
    assert main(["--out", str(tmp_path / "out"), "--minutes", "5"], made) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=3)[3] for line in said[:-1]] == [
        "kept",
        "failed with status 2",
        "left out: no_such_package is not installed",
        "left out: it may take 10000 minutes, and 5.0 are left",
    ]
    assert "loop" in (tmp_path / "out" / "good.log").read_text()
    assert main(["--out", str(tmp_path / "out"), "--only", "good"], made) == 0
    assert main(["--out", str(tmp_path / "out"), "--only", "absent"], made) == 1  # nothing ran, so nothing was kept


def test_a_benchmark_that_takes_too_long_is_ended_and_keeps_its_log(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = Benchmark("endless", """timeit -n 1 -r 1 'print("begun"); import time; time.sleep(600)'""", 0.05)
    started = time.monotonic()
    assert main(["--out", str(tmp_path)], [endless]) == 1
    assert time.monotonic() - started < 300
    assert "not finished" in capsys.readouterr().out
    assert "begun" in (tmp_path / "endless.log").read_text()


def test_the_modules_of_all_benchmarks_exist() -> None:
    for one in BENCHMARKS:
        assert (pathlib.Path(__file__).parents[2] / f"{one.command.split()[0].replace('.', '/')}.py").exists()
