"""The order of events of an asynchronous run: repeated from its file, it gives the same weights to the bit."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from router_replay.errors import ConfigError, RouterReplayError, TrainError
from router_replay.rl.config import TrainConfig, check_config, load_config
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.loop.train import train
from router_replay.rl.state import checkpoints
from tests.rl.conftest import settings_of

Make = Callable[..., TrainConfig]


def weights_of(output: pathlib.Path) -> dict[str, torch.Tensor]:
    folder = checkpoints.latest(output)
    assert folder is not None
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def lines_of(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(config: TrainConfig, aside: pathlib.Path) -> pathlib.Path:
    """Run once as it comes; return its schedule, and keep its output in `aside`."""
    train(config)
    shutil.move(config.output, aside)
    return aside / "schedule" / "step_000000.jsonl"


@pytest.mark.parametrize("mode", ["resume", "keep", "recompute"])
def test_a_run_that_follows_a_schedule_has_the_same_weights_to_the_bit(
    make_config: Make, tmp_path: pathlib.Path, mode: str, problems: pathlib.Path
) -> None:
    settings = [
        "loop=async", "steps=4", f"asynchronous.on_new_weights={mode}", "asynchronous.max_staleness=2",
        "asynchronous.max_in_flight=16", "loss.truncated_importance=2", "rollout.max_tokens=12", "evaluation.every=2",
        "evaluation.prompts=4", f"evaluation.file={problems}", "engine.arguments.max_batch=6",
    ]  # fmt: skip
    first = tmp_path / "first"
    schedule = recorded(make_config(*settings), first)
    config = make_config(*settings, f"asynchronous.schedule={schedule}")
    train(config)
    before, after = weights_of(first), weights_of(config.output)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    old, new = read_metrics(first), read_metrics(config.output)
    for name in ("reward", "loss", "grad_norm", "async/staleness_mean", "episodes/dropped_stale", "evaluation/reward"):
        assert [line.get(name) for line in old] == [line.get(name) for line in new]
    events, again = lines_of(schedule), lines_of(config.output / "schedule" / "step_000000.jsonl")
    last = max(place for place, event in enumerate(events) if event.get("do") == "version")
    assert again[: last + 1] == events[: last + 1]
    kinds = {str(event.get("do")) for event in events[1:]}
    assert kinds >= {"start", "submit", "answer", "end", "pass", "take", "cancel", "weights", "version"}


@pytest.fixture(scope="module")
def short_run(
    random_model: pathlib.Path, problems: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The schedule of a run of two steps."""
    output = tmp_path_factory.mktemp("recorded") / "run"
    torch.set_num_threads(1)  # as in each test; a fixture of the module runs before those of a test
    train(load_config(None, [*settings_of(random_model, problems, output), "loop=async"]))
    return output / "schedule" / "step_000000.jsonl"


def damaged(kind: str, lines: list[dict[str, object]]) -> tuple[list[str], int | None]:
    """Return the lines of a schedule that does not fit any more, and the event at which that shows."""
    texts = [json.dumps(line) for line in lines]
    if kind == "cut":
        place = next(place for place, line in enumerate(lines) if line.get("do") == "version")
        return texts[: place + 1], place - 1
    if kind == "not JSON":
        return [*texts[:5], "{", *texts[6:]], 4
    wanted = {"groups": "take", "checksum": "answer", "batch": "pass", "reward": "end", "admit": "start"}[kind]
    place = next(
        place for place, line in enumerate(lines) if line.get("do") == wanted and line.get(kind) not in (None, [])
    )
    value = lines[place][kind]
    changed = [*reversed(value)] if isinstance(value, list) else value + 1  # type: ignore[operator]
    if changed == value:
        changed = [*changed, 99]  # type: ignore[misc]
    return [*texts[:place], json.dumps({**lines[place], kind: changed}), *texts[place + 1 :]], place - 1


@pytest.mark.parametrize("kind", ["groups", "checksum", "batch", "reward", "admit", "cut", "not JSON"])
def test_a_schedule_that_does_not_fit_names_the_event(
    make_config: Make, tmp_path: pathlib.Path, short_run: pathlib.Path, kind: str
) -> None:
    schedule = tmp_path / "changed.jsonl"
    texts, event = damaged(kind, lines_of(short_run))
    schedule.write_text("\n".join(texts) + "\n")
    with pytest.raises(RouterReplayError, match=rf"event {event}\b") as raised:
        train(make_config("loop=async", f"asynchronous.schedule={schedule}"))
    assert isinstance(raised.value, ConfigError if kind == "not JSON" else TrainError)
    assert str(schedule) in str(raised.value)


def test_a_schedule_of_other_settings_or_of_nothing_is_refused(
    make_config: Make, tmp_path: pathlib.Path, short_run: pathlib.Path
) -> None:
    following = ["loop=async", f"asynchronous.schedule={short_run}"]
    with pytest.raises(ConfigError, match=r"other settings: seed = 0 there and 7 here"):
        train(make_config(*following, "seed=7"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="is not a schedule"):
        train(make_config("loop=async", f"asynchronous.schedule={tmp_path / 'empty'}"))
    with pytest.raises(ConfigError, match="cannot be read"):
        train(make_config("loop=async", f"asynchronous.schedule={tmp_path / 'none'}"))
    with pytest.raises(ConfigError, match="can repeat its passes"):
        check_config(make_config(*following, "engine.count=2"), 1)
    with pytest.raises(ConfigError, match=r'asynchronous\.schedule with loop = "sync"'):
        check_config(make_config(f"asynchronous.schedule={short_run}"), 1)
