"""A run goes on as the run that it was: what cannot be meant is refused, what is changed is told and recorded."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.loop.run import Run
from router_replay.rl.loop.train import train
from router_replay.rl.state import checkpoints
from tests.rl.conftest import settings_of


@pytest.fixture(scope="module")
def two_steps(
    random_model: pathlib.Path, problems: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The output of a run with a checkpoint after each of its two steps; tests change copies of it."""
    output = tmp_path_factory.mktemp("two_steps") / "run"
    train(load_config(None, [*settings_of(random_model, problems, output), "replay=off", "checkpoint.every=1"]))
    return output


@pytest.fixture
def started(make_config: Callable[..., TrainConfig], two_steps: pathlib.Path) -> Callable[..., TrainConfig]:
    """A run with two steps done, and configs to go on with."""
    shutil.copytree(two_steps, make_config().output)
    return lambda *more: make_config("steps=3", "replay=off", "checkpoint.every=1", *more)


def config_of(config: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.output / "config.json").read_text())
    return found


def changed_model(random_model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Another model of the same shape."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(random_model, tmp_path / "other_model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    next(iter(model.parameters())).data.mul_(2)
    model.save_pretrained(folder)
    return folder


def test_another_seed_model_or_environment_is_refused_with_both_values(
    started: Callable[..., TrainConfig], random_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    other = changed_model(random_model, tmp_path)
    before = config_of(started())
    for setting, words in {
        "seed=7": r"seed: the run was started with 0, now it is 7",
        f"model.path={other}": rf"model\.path: the run was started with '{random_model}' .*, now it is '{other}'",
        "environment.kind=arithmetic": r"environment\.kind: the run was started with 'jsonl', now it is 'arithmetic'",
    }.items():
        with pytest.raises(ConfigError, match=words) as raised:
            train(started(setting), resume=True)
        assert "set another output for a new run" in str(raised.value)
    assert config_of(started()) == before  # nothing was written
    assert train(started(), resume=True).step == 3


def test_other_problems_under_the_same_name_are_refused(
    make_config: Callable[..., TrainConfig], problems: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "mine.jsonl"
    shutil.copy(problems, file)
    train(make_config("steps=1", "replay=off", f"environment.file={file}"))
    again = make_config("steps=2", "replay=off", f"environment.file={file}")
    lines = file.read_text().splitlines()
    for changed in (lines[:-1], [lines[1], lines[0], *lines[2:]]):  # fewer of them; as many in another order
        file.write_text("\n".join(changed))
        with pytest.raises(ConfigError, match=r"environment\.file: the run was started with 12 problems \(digest \w+"):
            train(again, resume=True)
    moved = file.rename(tmp_path / "renamed.jsonl")
    moved.write_text("\n\n".join(lines))  # the same problems, laid out anew
    assert train(make_config("steps=2", "replay=off", f"environment.file={moved}"), resume=True).step == 2


def test_a_model_that_was_moved_is_the_same_model(
    started: Callable[..., TrainConfig], random_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    moved = shutil.copytree(random_model, tmp_path / "moved")
    assert train(started(f"model.path={moved}"), resume=True).step == 3


def test_other_changes_are_told_and_recorded_with_their_step(
    started: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "history" not in config_of(started())
    config = started("optimizer.lr=5e-4", "replay=r3")
    capsys.readouterr()
    train(config, resume=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "from step 2 on, optimizer.lr is 0.0005; it was 0.001" in said
    assert "from step 2 on, replay is 'r3'; it was 'off'" in said
    history = config_of(config)["history"]
    assert [entry["step"] for entry in history] == [2]
    assert history[0]["changes"] == {"replay": ["off", "r3"], "steps": [2, 3], "optimizer.lr": [0.001, 0.0005]}
    train(started("optimizer.lr=5e-4", "replay=r3", "steps=4"), resume=True)
    assert [entry["step"] for entry in config_of(config)["history"]] == [2, 3]


def test_a_checkpoint_of_an_older_version_goes_on_and_says_what_it_lacks(
    started: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = started("seed=7")
    folder = checkpoints.latest(config.output)
    assert folder is not None
    (folder / checkpoints.RECORD).unlink()
    assert train(config, resume=True).step == 3
    assert "has no run.json with the settings that it was made with" in " ".join(capsys.readouterr().out.split())


def test_the_optimizers_settings_are_those_of_now(started: Callable[..., TrainConfig]) -> None:
    """Its file has those of before, and loading it must not bring them back."""
    from router_replay.rl.processes import ranks

    config = started("optimizer.weight_decay=0.25", "optimizer.betas=[0.5, 0.75]")
    with Run(config, ranks.join(config), resume=True) as run:
        [group] = run.policy.optimizer.param_groups
        assert (group["weight_decay"], tuple(group["betas"])) == (0.25, (0.5, 0.75))
        assert run.policy.updates == 4
        assert any(state for state in run.policy.optimizer.state.values())


# -- checkpoints that were damaged -----------------------------------------------------------------------


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwritten(path: pathlib.Path) -> None:
    path.write_bytes(b"\x00\xff" * 100)


def removed(path: pathlib.Path) -> None:
    path.unlink()


FILES = ("trainer.pt", "model.safetensors", "progress.json", "run.json", "tokenizer.json")
HARMS = [(file, harm) for file in FILES for harm in (cut, overwritten, removed)]
HARMS.remove(("run.json", removed))  # a checkpoint of an older version, which has none


@pytest.mark.parametrize(("file", "harm"), HARMS)
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(
    started: Callable[..., TrainConfig], file: str, harm: Callable[[pathlib.Path], None]
) -> None:
    config = started()
    newest = config.output / "checkpoints" / "step_000002"
    harm(newest / file)
    with pytest.raises(TrainError) as raised:
        train(config, resume=True)
    message = str(raised.value)
    assert f"{newest / file} cannot be read: the checkpoint is damaged" in message
    assert f"continue from {newest.with_name('step_000001')}" in message


def test_a_damaged_checkpoint_that_was_moved_away_is_in_nobodys_way(started: Callable[..., TrainConfig]) -> None:
    config = started()
    newest = config.output / "checkpoints" / "step_000002"
    newest.rename(newest.with_name("damaged"))
    assert train(config, resume=True).step == 3


@pytest.mark.parametrize(
    "text", ["[1]", '{"step": "x"}', '{"step": -1}', '{"steps": 1}', "[" * 100_000, '{"step": 2.0}', '{"step": true}']
)
def test_a_progress_file_that_was_tampered_with_is_no_traceback(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(TrainError, match=r"progress\.json cannot be read"):
        checkpoints.read_progress(tmp_path)


class Payload:
    def __init__(self, mark: pathlib.Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self._mark,)


def test_a_trainer_file_with_code_in_it_runs_none(started: Callable[..., TrainConfig], tmp_path: pathlib.Path) -> None:
    import torch

    config = started()
    folder = checkpoints.latest(config.output)
    assert folder is not None
    torch.save({"optimizer": None, "random": Payload(tmp_path / "mark")}, folder / "trainer.pt")
    with pytest.raises(TrainError, match=r"trainer\.pt cannot be read"):
        train(config, resume=True)
    assert not (tmp_path / "mark").exists()


def test_weights_that_are_absent_from_the_file_are_not_drawn_at_random(started: Callable[..., TrainConfig]) -> None:
    from safetensors.torch import load_file, save_file

    config = started()
    folder = checkpoints.latest(config.output)
    assert folder is not None
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainError, match=r"model\.safetensors cannot be read.*lacks 1 weights.*lm_head"):
        train(config, resume=True)
