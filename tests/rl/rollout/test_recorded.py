"""A run records what it trained on, and training on the record again, without an engine, ends with the same weights."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from router_replay.errors import ConfigError
from router_replay.recording import TrajectoryReader, TrajectoryRecord, TrajectoryWriter
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.config.checks import check_config
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.loop.train import train
from router_replay.rl.state import checkpoints
from tests.rl.conftest import settings_of


@pytest.fixture(scope="module")
def recorded(
    random_model: pathlib.Path, problems: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, pathlib.Path]:
    """The output of a run of two steps, and its file of trajectories."""
    folder = tmp_path_factory.mktemp("recorded")
    output, file = folder / "run", folder / "routes"
    torch.set_num_threads(1)
    train(load_config(None, [*settings_of(random_model, problems, output), f"record={file}", "checkpoint.every=1"]))
    return output, file


def weights(output: pathlib.Path) -> dict[str, torch.Tensor]:
    folder = checkpoints.latest(output)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_trajectory_of_every_step_is_recorded(recorded: tuple[pathlib.Path, pathlib.Path]) -> None:
    output, file = recorded
    records = list(TrajectoryReader(file))
    assert [one.step for one in records] == [0] * 12 + [1] * 12
    for line in read_metrics(output):
        own = [one for one in records if one.step == line["step"]]
        assert np.mean([one.reward for one in own]) == pytest.approx(line["reward"])
        assert sum(len(one) for one in own) == line["tokens"]
        assert {one.group for one in own} == {0, 1, 2}
        for one in own:
            assert one.routes is not None
            assert one.routes.captured.tolist() == [True] * (len(one) - 1) + [False]
            assert set(np.asarray(one.versions)[one.loss_mask]) == {line["step"]}


def test_training_on_the_record_ends_with_the_same_weights_and_starts_no_engine(
    recorded: tuple[pathlib.Path, pathlib.Path],
    make_config: Callable[..., TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, file = recorded

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("router_replay.rl.engine_set.EngineSet.__init__", refuse)
    config = make_config(f"rollout.replay_from={file}")
    train(config)
    assert same(weights(output), weights(config.output))
    for before, after in zip(read_metrics(output), read_metrics(config.output), strict=True):
        for name in ("reward", "loss", "mismatch/k3", "routes/agreement", "routes/replayed", "tokens"):
            assert before[name] == after[name]


def test_a_resumed_run_records_its_steps_once(
    recorded: tuple[pathlib.Path, pathlib.Path], make_config: Callable[..., TrainConfig], tmp_path: pathlib.Path
) -> None:
    """The last step is done again after its checkpoint is taken away, as after a kill."""
    output, file = recorded
    config = make_config(f"record={tmp_path / 'routes'}", "checkpoint.every=1")
    shutil.copytree(output, config.output)
    shutil.copy(file, tmp_path / "routes")
    shutil.rmtree(config.output / "checkpoints" / "step_000002")
    train(config, resume=True)
    assert [one.step for one in TrajectoryReader(tmp_path / "routes")] == [0] * 12 + [1] * 12
    assert same(weights(output), weights(config.output))


def test_a_new_run_does_not_write_over_a_record(
    recorded: tuple[pathlib.Path, pathlib.Path], make_config: Callable[..., TrainConfig]
) -> None:
    before = recorded[1].read_bytes()
    with pytest.raises(ConfigError, match="already holds trajectories, and this run starts anew: move the file away"):
        train(make_config(f"record={recorded[1]}"))
    assert recorded[1].read_bytes() == before


def test_an_asynchronous_run_records_what_it_trained(
    make_config: Callable[..., TrainConfig], tmp_path: pathlib.Path
) -> None:
    config = make_config("loop=async", f"record={tmp_path / 'routes'}", "loss.truncated_importance=2.0")
    train(config)
    records = list(TrajectoryReader(tmp_path / "routes"))
    for line in read_metrics(config.output):
        assert sum(len(one) for one in records if one.step == line["step"]) == line["tokens"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["loop=async"], 'with loop = "async": recorded episodes have no engine'),
        (["record=other"], "with record: the trajectories are in that file already"),
        (["cluster.kind=ray"], 'with cluster.kind = "ray"'),
        (["rollout.replay_from=absent"], "there is no such file"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    recorded: tuple[pathlib.Path, pathlib.Path],
    make_config: Callable[..., TrainConfig],
    changes: list[str],
    reason: str,
) -> None:
    with pytest.raises(ConfigError, match="cannot work") as raised:
        check_config(make_config(f"rollout.replay_from={recorded[1]}", *changes), 1)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["steps=3"], "holds 2 steps, expected 3: set steps to 2 or less"),
        (["rollout.temperature=0.5"], "was sampled at temperature 1.0, and rollout.temperature is 0.5"),
        (["optimizer.mini_batches=12", "rollout.prompts=4"], None),
        (["optimizer.mini_batches=13", "rollout.prompts=4"], "step 0 has 12 episodes, fewer than"),
        (["model.path=tiny"], "holds routes of a model with RouterSpec"),
    ],
)
def test_a_file_that_does_not_fit_the_settings_is_refused_at_the_start(
    recorded: tuple[pathlib.Path, pathlib.Path],
    make_config: Callable[..., TrainConfig],
    changes: list[str],
    reason: str | None,
) -> None:
    config = make_config(f"rollout.replay_from={recorded[1]}", *changes)
    if reason is None:
        train(config)
        return
    with pytest.raises(ConfigError) as raised:
        train(config)
    assert reason in str(raised.value)


def test_r3_needs_routes_and_r2_does_not(
    recorded: tuple[pathlib.Path, pathlib.Path], make_config: Callable[..., TrainConfig], tmp_path: pathlib.Path
) -> None:
    with TrajectoryWriter(tmp_path / "bare") as writer:
        for one in TrajectoryReader(recorded[1]):
            bare = dataclasses.replace(one.sample, routes=None)
            writer.write([TrajectoryRecord(bare, one.step, one.group, one.episode, one.problem, one.reward)])
    config = make_config(f"rollout.replay_from={tmp_path / 'bare'}")
    with pytest.raises(ConfigError, match=r'has no routes, and replay = "r3" needs them: set replay = "r2"'):
        train(config)
    again = make_config(f"rollout.replay_from={tmp_path / 'bare'}", "replay=r2", f"output={tmp_path / 'r2'}")
    train(again)
