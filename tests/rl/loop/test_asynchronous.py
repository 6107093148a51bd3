"""The asynchronous loop whole: what it measures, what a kill leaves, and what it refuses."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from router_replay.engines import EnginePool
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.errors import ConfigError, RewardError, TrainError
from router_replay.rl.config import TrainConfig, check_config
from router_replay.rl.engine_start import check_engine
from router_replay.rl.log.metrics import NAMES, read_metrics
from router_replay.rl.loop.first_rank import FirstRank
from router_replay.rl.loop.train import train
from router_replay.rl.rollout.ledger import StreamState
from router_replay.rl.state import checkpoints, journal

ROOT = pathlib.Path(__file__).parents[3]


def state_of(output: pathlib.Path) -> StreamState:
    folder = checkpoints.latest(output)
    assert folder is not None
    return StreamState.read(checkpoints.read_progress(folder).rollouts)


def adds_up(line: dict[str, Any]) -> bool:
    parts = [value for name, value in line.items() if name.startswith("episodes/") and name != "episodes/admitted"]
    return bool(line["episodes/admitted"] == sum(parts))


@pytest.mark.parametrize("mode", ["resume", "keep", "recompute"])
def test_a_run_learns_within_the_bound_and_says_what_it_did(make_config: Callable[..., TrainConfig], mode: str) -> None:
    config = make_config(
        "loop=async", f"asynchronous.on_new_weights={mode}", "asynchronous.max_staleness=2", "steps=6",
        "optimizer.lr=5e-3", "rollout.prompts=6", "loss.truncated_importance=2", "checkpoint.every=2",
    )  # fmt: skip
    progress = train(config)
    assert (progress.step, progress.version) == (6, 6)
    lines = read_metrics(config.output)
    assert [line["step"] for line in lines] == list(range(6))
    assert lines[-1]["reward"] > lines[0]["reward"] * 1.3
    for number, line in enumerate(lines):
        assert set(line) - {"step"} <= set(NAMES)
        assert 0 <= line["async/staleness_mean"] <= line["async/staleness_max"] <= 2
        assert line["async/versions_per_sample"] >= 1
        assert 0 <= line["async/trainer_idle"] <= 1
        assert 0 <= line["async/engine_idle"] <= 1
        assert line["routes/live"] == 0  # every row was captured, also over weight changes
        assert line["episodes/trained"] == (number + 1) * 24
        assert adds_up(line)
    assert lines[0]["mismatch/k3"] < 1e-9
    assert max(line["async/staleness_max"] for line in lines) > 0  # rollouts went on during the updates
    state = state_of(config.output)
    assert state.ledger.trained == 6 * 24
    saved = journal.read(config.output, 6, 6, _spec(config))
    assert state.ledger.open() == len(saved) == sum(group.alive for group in state.open)
    assert [path.name for path in sorted((config.output / "journal").iterdir())] == [
        "step_000004.bin", "step_000006.bin",
    ]  # fmt: skip


def test_an_engine_that_dies_among_several_costs_no_episode(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FirstRank.push
    left: list[dict[str, Any]] = []

    def push(self: FirstRank, state: Any, version: int) -> None:
        pool = self.engine
        assert isinstance(pool, EnginePool)
        if version == 2:
            pool._members[0].engine.close()
        real(self, state, version)
        left.append(pool.report())

    monkeypatch.setattr(FirstRank, "push", push)
    config = make_config("loop=async", "engine.count=2", "steps=4", "asynchronous.max_staleness=3", "optimizer.lr=1e-3")
    assert train(config).step == 4
    assert [facts["lost"] == "" for facts in left[0].values()] == [True, True]
    assert [facts["lost"] == "" for facts in left[-1].values()] == [False, True]
    assert left[-1]["engine1"]["version"] == 4
    assert left[0]["engine0"]["served"] > 0
    for line in read_metrics(config.output):
        assert line["routes/live"] == 0
        assert adds_up(line)
    dropped = state_of(config.output).ledger.dropped
    assert set(dropped.values()) - {dropped["interrupted"]} <= {0}  # interrupted are those in progress at the end


def test_the_engines_log_probs_replace_the_scoring_pass(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("loop=async", "loss.old=rollout", "loss.age_weight=0.5", "steps=3", "optimizer.lr=1e-3")
    train(config)
    for line in read_metrics(config.output):
        assert "mismatch/k3" not in line
        assert "routes/agreement" not in line
        assert line["routes/replayed"] == line["tokens"] - 12  # one pass: the last token of each predicts nothing
        assert line["grad_norm"] > 0


def test_two_processes_share_an_asynchronous_run(settings: list[str], tmp_path: pathlib.Path) -> None:
    arguments = [word for setting in [*settings, "loop=async", "steps=2"] for word in ("--set", setting)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [*command, "-m", "router_replay.cli", "train", *arguments],
        env=environment,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    lines = read_metrics(tmp_path / "run")
    assert [line["episodes/trained"] for line in lines] == [12, 24]
    assert all(adds_up(line) for line in lines)


def test_kill_minus_nine_trains_nothing_twice_and_loses_nothing_finished(
    make_config: Callable[..., TrainConfig], settings: list[str]
) -> None:
    more = ["loop=async", "steps=6", "checkpoint.every=2", "asynchronous.staleness=admission", "optimizer.lr=1e-4"]
    config = make_config(*more)
    arguments = [word for setting in [*settings, *more] for word in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    metrics = config.output / "metrics.jsonl"
    seen: list[set[tuple[int, int]]] = []
    for steps in (1, 3, 4):
        process = subprocess.Popen(
            [sys.executable, "-m", "router_replay.cli", "train", *arguments, "--resume"],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()[-2000:]
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        state, step = state_of(config.output), _step(config.output)
        opened = {group.number for group in state.open}
        on_disk = {
            (one.group, member)
            for member, _, one in journal.read(config.output, step, step, _spec(config))
            if one.group in opened or one.group >= state.next_group
        }
        assert on_disk  # rollouts go on beside the trainer, so a kill finds finished episodes
        seen.append(on_disk)
    assert train(config, resume=True).step == 6
    lines = read_metrics(config.output)
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["episodes/trained"] for line in lines] == [12 * (number + 1) for number in range(6)]
    assert all(adds_up(line) for line in lines)
    state = state_of(config.output)
    assert state.ledger.open() == len(journal.read(config.output, 6, 6, _spec(config)))
    assert state.ledger.dropped["stale"] == 0  # by this rule nothing finished is ever dropped
    trained = set(range(state.next_group)) - {group.number for group in state.open}
    assert {group for group, _ in seen[-1]} <= trained | {group.number for group in state.open}


def test_an_error_leaves_a_state_that_goes_on(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tests.rl.rewards as rewards

    config = make_config("loop=async", "steps=4", "checkpoint.every=1")
    calls, right = collections.Counter[str](), rewards.sevens

    def fails(prompt: Any, completion: Any, answer: Any) -> float:
        calls["reward"] += 1
        if calls["reward"] == 40:
            raise OSError("grading broke")
        return float(right(prompt, completion, answer))

    monkeypatch.setattr(rewards, "sevens", fails)
    with pytest.raises(RewardError, match="grading broke"):
        train(config)
    before = state_of(config.output)
    assert train(config, resume=True).step == 4
    after = state_of(config.output)
    assert after.ledger.trained == 48
    assert after.ledger.admitted > before.ledger.admitted
    assert all(adds_up(line) for line in read_metrics(config.output))


def test_the_synchronous_loop_does_not_drop_open_groups_in_silence(make_config: Callable[..., TrainConfig]) -> None:
    train(make_config("loop=async", "steps=1"))
    with pytest.raises(ConfigError, match=r'loop = "sync": the checkpoint has \d+ groups'):
        train(make_config("steps=2"), resume=True)
    assert train(make_config("loop=async", "steps=2"), resume=True).step == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["asynchronous.max_staleness=3"], r'asynchronous\.max_staleness with loop = "sync"'),
        (["loop=async", "asynchronous.max_in_flight=3"], "max_in_flight = 3: a group"),
        (["loop=async", "asynchronous.max_ready=2"], "max_ready = 2: a step needs"),
        (["loss.old=rollout", "replay=r2"], "R2 records the experts in the pass that this setting skips"),
        (["loss.old=rollout", "loss.truncated_importance=2"], "would be 1 everywhere"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    make_config: Callable[..., TrainConfig], changes: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(make_config(*changes), 1)


def test_old_tokens_without_a_correction_give_a_warning(make_config: Callable[..., TrainConfig]) -> None:
    assert "tokens of older versions" in " ".join(check_config(make_config("loop=async"), 1))
    for setting in ("loss.old=rollout", "loss.truncated_importance=2"):
        assert "tokens of older versions" not in " ".join(check_config(make_config("loop=async", setting), 1))


def test_modes_that_an_engine_cannot_do_are_refused_with_its_reason(
    make_config: Callable[..., TrainConfig], random_model: pathlib.Path
) -> None:
    with EmbeddedEngine(random_model) as engine:
        can = engine.capabilities
        engine.capabilities = dataclasses.replace(can, forced_routes=False, why_not="no plugin")
        with pytest.raises(ConfigError, match=r'"resume" needs.*no plugin\. Set "recompute" or "keep"'):
            check_engine(make_config("loop=async"), engine, engine.spec)
        check_engine(make_config("loop=async", "asynchronous.on_new_weights=keep"), engine, engine.spec)
        engine.capabilities = dataclasses.replace(can, cannot_keep="it says no versions")
        with pytest.raises(ConfigError, match=r'"keep" is not possible.*it says no versions\. Set "recompute"'):
            check_engine(make_config("loop=async", "asynchronous.on_new_weights=keep"), engine, engine.spec)


def test_a_damaged_state_of_the_rollouts_is_named(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("loop=async", "steps=1")
    train(config)
    folder = checkpoints.latest(config.output)
    assert folder is not None
    fields = json.loads((folder / "progress.json").read_text())
    del fields["rollouts"]["next_group"]
    (folder / "progress.json").write_text(json.dumps(fields))
    with pytest.raises(TrainError, match=r"rollouts in progress\.json.*next_group"):
        train(config, resume=True)


def _spec(config: TrainConfig) -> Any:
    from router_replay import RouterSpec

    return RouterSpec.from_config(json.loads((pathlib.Path(config.model.path) / "config.json").read_text()))


def _step(output: pathlib.Path) -> int:
    folder = checkpoints.latest(output)
    assert folder is not None
    return checkpoints.read_progress(folder).step
