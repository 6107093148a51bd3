"""metrics.jsonl: what is written is read again, also after a kill in the middle and a resume."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from router_replay.errors import ConfigError, MeasureError, TrainError
from router_replay.rl.config import LoggingConfig
from router_replay.rl.log.metrics import NAMES, MetricsWriter, read_metrics
from router_replay.run_files import read_layers

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "metrics.md"
PLAIN = LoggingConfig(tensorboard=False)


def write_steps(folder: pathlib.Path, steps: range, done: int = 0, reward: float = 0.0) -> None:
    with MetricsWriter(folder, PLAIN, {}, done) as writer:
        for step in steps:
            writer.write(step, {"reward": reward, "mismatch/k3": 1e-3 / (step + 1)})


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    values = {"mismatch/k3": 1.0 / 3, "reward": np.float32(0.5), "loss": torch.tensor(-0.25), "routes/live": 7}
    with MetricsWriter(tmp_path / "a" / "run", PLAIN, {}) as writer:
        writer.write(0, values)
    [line] = read_metrics(tmp_path / "a" / "run")
    assert line == {"step": 0, "mismatch/k3": 1.0 / 3, "reward": 0.5, "loss": -0.25, "routes/live": 7}
    assert next(iter(line)) == "step"


def test_a_line_can_be_read_before_the_writer_is_closed(tmp_path: pathlib.Path) -> None:
    """A kill -9 after a step loses nothing of that step."""
    writer = MetricsWriter(tmp_path, PLAIN, {})
    writer.write(0, {"reward": 1.0})
    assert read_metrics(tmp_path) == [{"step": 0, "reward": 1.0}]
    writer.close()


def test_not_finite_is_null_and_strict_json(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, PLAIN, {}) as writer:
        writer.write(0, {"loss": math.nan, "grad_norm": math.inf, "mismatch/k3": -math.inf, "reward": 1.0})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 0, "loss": None, "grad_norm": None, "mismatch/k3": None, "reward": 1.0}


def test_values_per_layer_are_read_apart_and_survive_a_resume(tmp_path: pathlib.Path) -> None:
    lists = {"routing/layers": [1, 2], "routing/load/layers": [np.float32(1.5), math.nan]}
    with MetricsWriter(tmp_path, PLAIN, {}) as writer:
        writer.write(0, {"reward": 1.0, **lists})
        writer.write(1, {"reward": 2.0})
    MetricsWriter(tmp_path, PLAIN, {}, done=2).close()  # a resume writes the kept lines again
    assert read_metrics(tmp_path) == [{"step": 0, "reward": 1.0}, {"step": 1, "reward": 2.0}]
    assert read_layers(tmp_path) == [{"step": 0, "routing/layers": [1, 2], "routing/load/layers": [1.5, None]}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "routing/load/layers": [1, "two"]}\n')
    with pytest.raises(MeasureError, match=r"jsonl:3: routing/load/layers must hold numbers or null, got .two."):
        read_layers(tmp_path)


def test_an_unknown_name_is_refused_and_nothing_written(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, PLAIN, {}) as writer:
        with pytest.raises(MeasureError, match=r"'mismatch/k2' is not a documented metric: write 'mismatch/k\d'"):
            writer.write(0, {"reward": 1.0, "mismatch/k2": 0.0})
        assert read_metrics(tmp_path) == []


def test_a_step_is_written_once(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, PLAIN, {}) as writer:
        writer.write(3, {"reward": 1.0})
        with pytest.raises(MeasureError, match="step 3 cannot follow step 3"):
            writer.write(3, {"reward": 1.0})
    with (
        MetricsWriter(tmp_path, PLAIN, {}, done=4) as writer,
        pytest.raises(MeasureError, match="step 2 cannot follow step 3"),
    ):
        writer.write(2, {"reward": 1.0})


def test_resuming_drops_the_steps_that_run_again(tmp_path: pathlib.Path) -> None:
    write_steps(tmp_path, range(5), reward=1.0)
    before = read_metrics(tmp_path)
    write_steps(tmp_path, range(3, 6), done=3, reward=2.0)
    after = read_metrics(tmp_path)
    assert after[:3] == before[:3]
    assert [line["step"] for line in after] == [0, 1, 2, 3, 4, 5]
    assert [line["reward"] for line in after] == [1.0] * 3 + [2.0] * 3


def test_a_torn_last_line_is_dropped(tmp_path: pathlib.Path) -> None:
    write_steps(tmp_path, range(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rewa')
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    write_steps(tmp_path, range(2, 4), done=2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"reward": 1}', '{"step": 1, "reward": "high"}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: pathlib.Path, line: str) -> None:
    write_steps(tmp_path, range(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + '\n{"step": 2}\n')
    with pytest.raises(MeasureError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MeasureError, match="give the `output` folder"):
        read_metrics(tmp_path / "nowhere")


def test_the_settings_lie_beside(tmp_path: pathlib.Path) -> None:
    MetricsWriter(tmp_path, PLAIN, {"replay": "r3", "output": tmp_path}).close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"replay": "r3", "output": str(tmp_path)}


def test_sinks_that_are_not_installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of a missing package meets
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with MetricsWriter(tmp_path / "a", LoggingConfig(tensorboard=True), {}) as writer:
        assert writer.sinks == ("jsonl",)
        writer.write(0, {"reward": 1.0})
    with pytest.raises(ConfigError, match="pip install wandb"):
        MetricsWriter(tmp_path / "b", LoggingConfig(wandb=True), {})
    assert not (tmp_path / "b").exists()


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done in (0, 2):
        with MetricsWriter(tmp_path, LoggingConfig(), {}, done) as writer:
            assert writer.sinks == ("jsonl", "tensorboard")
            for step in range(done, done + 3):
                writer.write(step, {"reward": 10 * done + step, "loss": math.nan})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 22.0),
        (3, 23.0),
        (4, 24.0),
    ]


class FakeWandb(types.ModuleType):
    """Takes the calls that the writer makes. The real package is not among the requirements: wandb 0.31 is a download
    of 20 MB (56 MB installed), starts a service process of its own, and pins a beta version of another package."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0

    def init(self, *, project: str, name: str, id: str, resume: str, dir: str, config: dict[str, Any]) -> FakeWandb:
        given = {"project": project, "name": name, "id": id, "resume": resume, "dir": dir, "config": config}
        self.started.append(given)
        return self

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_in_the_same_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logging = LoggingConfig(tensorboard=False, wandb=True, project="mine")
    for done in (0, 1):
        with MetricsWriter(tmp_path / "run", logging, {"seed": 0}, done) as writer:
            assert writer.sinks == ("jsonl", "wandb")
            writer.write(done, {"reward": 1.0, "loss": math.nan})
    run_id = (tmp_path / "run" / "wandb_id.txt").read_text()
    given = {"project": "mine", "name": "run", "id": run_id, "resume": "allow", "dir": str(tmp_path / "run")}
    assert wandb.started == [{**given, "config": {"seed": 0}}] * 2
    assert wandb.logged == [({"reward": 1.0}, 0), ({"reward": 1.0}, 1)]
    assert wandb.finished == 2


def test_every_name_is_documented() -> None:
    text = DOCS.read_text()
    rows = [f"| `{name}` | {meaning} |" for name, meaning in NAMES.items()]
    assert [row for row in rows if row not in text] == []
    assert text.count("| `") == len(NAMES)


def test_a_full_disk_is_named_with_the_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsWriter(tmp_path, PLAIN, {}) as writer:
        writer._file.close()
        writer._file = pathlib.Path("/dev/full").open("w")  # noqa: SIM115
        with pytest.raises(TrainError, match=r"metrics\.jsonl: the line of step 0 could not be written: No space left"):
            writer.write(0, {"reward": 1.0})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainError, match=r"config\.json could not be written: No space left"):
        MetricsWriter(tmp_path, PLAIN, {})
    assert not list(tmp_path.glob("*.new"))
