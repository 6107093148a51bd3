"""The demo's promise, on its own rollouts: a real vLLM engine, the ready model, replay off against R3."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import psutil
import pytest

from router_replay.errors import ConfigError, TrainError
from router_replay.recipes.tiny.demo import _clear, demo_config, findings, run_demo
from router_replay.report import comparison
from router_replay.report.runs import Run
from router_replay.rl import engine_set
from router_replay.rl.state.run_folder import LOCK, hold
from router_replay.run_files import read_metrics

PROCESSES: list[list[str]] = []  # the command lines of the processes that each engine started


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("demo")
    start = engine_set.start_engine

    def noting(*args: Any) -> Any:
        before = set(psutil.Process().children(recursive=True))  # engines of other tests may still run
        engine = start(*args)
        started = set(psutil.Process().children(recursive=True)) - before
        PROCESSES.append([" ".join(child.cmdline()) for child in started])
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_set, "start_engine", noting)
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # a user's own setting would win
        run_demo(out, steps=1)
    return out


def test_the_engine_core_runs_the_model_itself(shown: pathlib.Path) -> None:
    """A worker process beside it would wait in a loop on a core that the trainer needs."""
    assert len(PROCESSES) == 2
    for commands in PROCESSES:
        assert any("EngineCore" in command for command in commands), commands
        assert not any("Worker" in command for command in commands), commands


def test_k3_falls_threefold_at_the_first_step(shown: pathlib.Path) -> None:
    off, r3 = comparison([Run("off", shown / "off"), Run("r3", shown / "r3")])
    assert off.k3_first is not None
    assert r3.k3_first is not None
    assert r3.k3_first <= off.k3_first / 3
    assert off.reward_first == r3.reward_first  # the same rollouts: what differs is the trainer
    assert (off.rows_replayed, r3.rows_live) == (0, 0)
    assert r3.rows_replayed == off.rows_live


def test_the_page_and_its_numbers_are_there(shown: pathlib.Path) -> None:
    page = (shown / "report.html").read_text()
    assert "<svg" in page
    assert json.loads((shown / "report.json").read_text())


def test_the_weights_reach_the_engine_and_are_saved(shown: pathlib.Path) -> None:
    [line] = read_metrics(shown / "r3")
    assert line["version"] == 1
    assert line["grad_norm"] > 0
    assert (shown / "r3" / "checkpoints" / "step_000001" / "model.safetensors").exists()


def test_what_is_said_is_what_was_measured(shown: pathlib.Path) -> None:
    rows = comparison([Run("off", shown / "off"), Run("r3", shown / "r3")])
    fall, _, reward, _ = findings(rows)
    assert "at least the factor of 3 that we promise" in fall
    assert "differ by noise only" in reward
    [_, other] = rows
    worse = findings([rows[0], other.__class__(**{**vars(other), "k3_first": rows[0].k3_first})])
    assert "less than the factor of 3 that we promise" in worse[0]


def test_the_runs_differ_in_nothing_but_replay(tmp_path: pathlib.Path) -> None:
    for given in ({}, {"fp8": True}, {"float32_routers": True}):
        off, r3 = (demo_config(mode, tmp_path, 25, **given) for mode in ("off", "r3"))
        assert off.model_copy(update={"replay": "r3", "output": r3.output}) == r3
        assert off.engine.quantize == ("fp8" if "fp8" in given else "none")
        assert off.model.router_dtype == ("float32" if "float32_routers" in given else "model")


def test_a_demo_removes_an_earlier_demo_and_nothing_else(tmp_path: pathlib.Path) -> None:
    trained = tmp_path / "r3" / "checkpoints" / "step_000100"
    trained.mkdir(parents=True)
    with pytest.raises(ConfigError, match="contains files that no demo wrote"):
        run_demo(tmp_path, steps=1)
    assert trained.exists()
    old = tmp_path / "off"  # which was cleared for the demo before that was seen
    (old / "checkpoints").mkdir()
    (old / "metrics.jsonl").touch()
    with hold(old), pytest.raises(TrainError, match="is in use by another run"):
        _clear(old)
    assert (old / "metrics.jsonl").exists()
    _clear(old)
    assert {path.name for path in old.iterdir()} == {LOCK, ".demo"}
