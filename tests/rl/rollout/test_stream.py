"""Rollouts beside the trainer: no token is too old, and every episode ends once, whatever the schedule is."""

from __future__ import annotations

import collections
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router_replay.errors import EngineError, RewardError, TrainError
from router_replay.rl.config import AsynchronousConfig, EngineConfig, RolloutConfig, TrainConfig
from router_replay.rl.environments.base import Environment, Turn
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.player import Episode
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state.journal import Journal, read
from tests.rl.rollout.chance_engine import SPEC, ChanceEngine, ChanceEnvironment, ChanceTask

MODES = ["resume", "keep", "recompute"]


def config_of(batch: int, group: int, **settings: object) -> TrainConfig:
    return TrainConfig(
        loop="async",
        rollout=RolloutConfig(prompts=batch, group=group, max_tokens=40, max_turns=3),
        engine=EngineConfig(max_length=400),
        asynchronous=AsynchronousConfig.model_validate(settings),
    )


@contextmanager
def stream_of(
    config: TrainConfig,
    folder: pathlib.Path,
    seed: int = 0,
    *,
    fails: float = 0.0,
    step: int = 0,
    state: StreamState | None = None,
    task: ChanceTask | None = None,
) -> Iterator[RolloutStream]:
    """A stream as the first rank opens it, at the checkpoint of `step`; version and step are the same here."""
    finished = read(folder, step, step, SPEC) if state else []
    start = state or StreamState(Ledger(), 0)
    with ChanceEngine(seed, step, fails=fails) as engine:
        stream = RolloutStream(engine, task or ChanceTask(), config, Journal(folder), start, finished, version=step)
        stream.begin_journal(step)
        with stream:
            yield stream


def train(stream: RolloutStream, version: int) -> list[Episode]:
    """One step of a trainer: take, and give the engine new weights."""
    episodes = stream.take(version)
    engine = stream._engine
    stream.new_weights(version + 1, lambda in_flight: engine.update_weights({}, version + 1, in_flight))
    return episodes


def groups_of(episodes: list[Episode]) -> collections.Counter[int]:
    return collections.Counter(episode.group for episode in episodes)


def check_sum(stream: RolloutStream) -> None:
    """Every admitted episode is trained, dropped, finished or playing."""
    values = stream.figures()
    parts = [value for name, value in values.items() if name.startswith("episodes/") and name != "episodes/admitted"]
    assert values["episodes/admitted"] == sum(parts)
    assert min(parts) >= 0


def finished_in(stream: RolloutStream) -> set[tuple[int, int]]:
    """The finished episodes that are not trained, as the stream holds them."""
    held = stream._rollouts
    groups = [*held._ready, *held._taken, *list(held._running.values()), *list(held._again)]
    return {(group.number, member) for group in groups for member in list(group.members)}


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    mode=st.sampled_from(MODES),
    batch=st.integers(1, 4),
    group=st.integers(2, 4),
    oversample=st.sampled_from([1.0, 2.5]),
    limit=st.sampled_from([0, 5]),
    drop=st.booleans(),
)
def test_no_token_is_older_than_the_strict_bound_in_any_schedule(
    seed: int, staleness: int, mode: str, batch: int, group: int, oversample: float, limit: int, drop: bool
) -> None:
    config = config_of(
        batch, group, max_staleness=staleness, on_new_weights=mode, oversample=oversample, max_in_flight=limit,
        drop_without_signal=drop,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, stream_of(config, pathlib.Path(folder), seed) as stream:
        trained: collections.Counter[int] = collections.Counter()
        for version in range(8):
            episodes = train(stream, version)
            assert len(episodes) == batch * group
            for episode in episodes:
                ages = version - episode.versions
                assert ages.min() >= 0 and ages.max() <= staleness  # noqa: PT018
                assert [one.loss_mask.sum() for one in episode.trajectories] == [len(episode.versions)]
            if drop:
                for number in groups_of(episodes):
                    assert len({episode.reward for episode in episodes if episode.group == number}) > 1
            trained += groups_of(episodes)
            check_sum(stream)
            assert stream.ledger.trained == (version + 1) * batch * group
        assert set(trained.values()) == {group}  # whole groups, each once
        stream.stop()
        state = stream.snapshot(8)
        assert state.ledger.open() == sum(one.alive for one in state.open)
        left = read(pathlib.Path(folder), 8, 8, SPEC)
        assert len(left) == state.ledger.open()  # what is neither trained nor dropped is saved


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), every=st.integers(1, 4), kills=st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_every_episode_ends_once_through_failures_and_kills(seed: int, every: int, kills: list[int]) -> None:
    """A kill leaves the last checkpoint's state and the journal as it is on disk at that moment."""
    config = config_of(2, 3, max_staleness=2, on_new_weights=MODES[seed % 3])
    with tempfile.TemporaryDirectory() as name:
        folder, step = pathlib.Path(name) / "0", 0
        state = StreamState(Ledger(), 0)
        done: list[tuple[int, list[int]]] = []  # the groups of each trained step of the state that survives
        for life, steps in enumerate([*kills, 6]):
            last, saved = life == len(kills), step
            done = done[:saved]
            fails = 0.0 if last else 0.004
            with stream_of(config, folder, seed + life, fails=fails, step=saved, state=state) as stream:
                check_sum(stream)
                try:
                    for version in range(saved, saved + steps + 1):
                        done.append((version, sorted(groups_of(train(stream, version)))))
                        check_sum(stream)
                        if (version + 1) % every == 0 or last:
                            step, state = version + 1, stream.snapshot(version + 1)
                except EngineError:
                    pass  # by chance; the last checkpoint and the journal are left
                finished = finished_in(stream)
                folder = shutil.copytree(folder, pathlib.Path(name) / str(life + 1))
            on_disk = {(one.group, member) for member, _, one in read(folder, step, step, SPEC)}
            assert finished <= on_disk  # whatever had finished at the kill
            before = {group for version, groups in done if version < step for group in groups}
            dropped = set(range(state.next_group)) - before - {one.number for one in state.open}
            kept = {key for key in on_disk if key[0] not in before | dropped}
            with ChanceEngine(0) as engine:
                found = read(folder, step, step, SPEC)
                after = RolloutStream(engine, ChanceTask(), config, Journal(folder), state, found, version=step)
            held = [*after._rollouts._ready, *after._rollouts._again]
            lost = kept - {(group.number, member) for group in held for member in group.members}
            assert after.ledger.dropped["stale"] - state.ledger.dropped["stale"] >= len(lost)  # only by their age
            assert not {group.number for group in held} & before  # nothing is trained twice
        trained = [group for _, groups in done for group in groups]
        assert len(trained) == len(set(trained)) == 2 * len(done)


def test_a_group_is_resumed_with_the_episodes_that_it_had(tmp_path: pathlib.Path) -> None:
    config = config_of(1, 4, max_staleness=0)
    with stream_of(config, tmp_path) as stream:
        first = stream.take(0)
        state = stream.snapshot(0)
    assert [group.alive for group in state.open] == [4]
    episodes = read(tmp_path, 0, 0, SPEC)
    keys = {(one.group, member): one.trajectories[0].token_ids.tolist() for member, _, one in episodes}
    assert keys == {(0, one.number): one.trajectories[0].token_ids.tolist() for one in first}
    # As a kill in the middle of a write leaves it: without the last episode.
    path = tmp_path / "journal" / "step_000000.bin"
    path.write_bytes(path.read_bytes()[:-5])
    assert len(read(tmp_path, 0, 0, SPEC)) == 3
    with stream_of(config, tmp_path, step=0, state=state) as stream:
        again = stream.take(0)
        assert sorted(one.group for one in again) == [0] * 4
        kept = [one.trajectories[0].token_ids.tolist() for one in again]
        assert sum(tokens in kept for tokens in keys.values()) >= 3
        assert stream.ledger.dropped["interrupted"] == 1
        check_sum(stream)


def test_groups_without_signal_end_a_run_that_has_no_others(tmp_path: pathlib.Path) -> None:
    class Flat(ChanceTask):
        def environment(self) -> Environment:
            return FlatEnvironment()

    class FlatEnvironment(ChanceEnvironment):
        def step(self, token_ids: object) -> Turn:
            return Turn(1.0)

    config = config_of(1, 2, drop_without_signal=True)
    with (
        stream_of(config, tmp_path, task=Flat()) as stream,
        pytest.raises(TrainError, match=r"the last 50 groups had equal rewards.*drop_without_signal"),
    ):
        stream.take(0)
    assert stream.ledger.dropped["no_signal"] >= 100


def test_an_error_of_an_environment_reaches_the_trainer(tmp_path: pathlib.Path) -> None:
    class Broken(ChanceTask):
        def environment(self) -> Environment:
            raise ZeroDivisionError("mine")

    with (
        stream_of(config_of(1, 2), tmp_path, task=Broken()) as stream,
        pytest.raises(RewardError, match=r"problem 0: Broken.environment.*ZeroDivisionError: mine"),
    ):
        stream.take(0)


def test_a_rule_that_lets_nothing_in_is_named(tmp_path: pathlib.Path) -> None:
    config = config_of(1, 2, staleness=f"{__name__}:Closed")
    with stream_of(config, tmp_path) as stream, pytest.raises(TrainError, match=r"Closed.*admits no other"):
        stream.take(0)


class Closed:
    """A rule of one's own, which admits nothing."""

    def __init__(self, max_staleness: int, batch: int) -> None: ...

    def capacity(self, version: int) -> int:
        return 0

    def admit(self, now: object) -> bool:
        return False

    def select(self, ready: object, version: int) -> list[object]:
        return []

    def evict(self, ready: object, version: int) -> list[object]:
        return []

    abort = evict
