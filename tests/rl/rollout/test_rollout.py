"""Episodes over a real engine: turns are stitched, masks and rows are right, history that changes branches."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from router_replay import Routes, Sample
from router_replay.engines import Completion, EnginePool
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.types import Request, Sampling
from router_replay.errors import RewardError
from router_replay.rl.config import RolloutConfig
from router_replay.rl.environments.base import Environment, Turn
from router_replay.rl.rollout import Episode, Rollout, seed_of

CONFIG = RolloutConfig(prompts=2, group=2, max_tokens=4, max_turns=3)


@pytest.fixture(scope="module")
def engine(random_model: pathlib.Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(random_model, max_length=64, eos_token_id=[]) as engine:
        yield engine


@dataclasses.dataclass
class Scripted:
    """An environment and its task in one: what `answer` makes of each turn."""

    answer: Callable[[int, Sequence[int]], Turn]
    stop_token_ids: tuple[int, ...] = ()
    problems: int | None = None
    max_turns: int | None = None
    turn: int = 0
    repeat: int = 1

    def environment(self) -> Environment:
        return Scripted(self.answer, repeat=self.repeat)

    def reset(self, problem: int) -> Sequence[int]:
        return (5, 6, 7 + problem % 5) * self.repeat

    def step(self, token_ids: Sequence[int]) -> Turn:
        self.turn += 1
        return self.answer(self.turn, token_ids)


def play(engine: EmbeddedEngine, task: Scripted, config: RolloutConfig = CONFIG, max_length: int = 64) -> list[Episode]:
    return Rollout(engine, task, [0, 1], config, max_length=max_length, seed=(0, 0)).run()


@pytest.mark.parametrize(("of_the_task", "turns"), [(None, 3), (2, 2), (5, 3)])
def test_an_episode_ends_at_the_turns_of_its_task_and_of_the_config(
    engine: EmbeddedEngine, of_the_task: int | None, turns: int
) -> None:
    task = Scripted(lambda *_: Turn(done=False, observation=(9,)), max_turns=of_the_task)
    assert [episode.turns for episode in play(engine, task)] == [turns] * 4


def test_observations_are_environment_tokens_with_rows_of_their_own(engine: EmbeddedEngine) -> None:
    episodes = play(engine, Scripted(lambda turn, _: Turn(0.5, done=turn == 3, observation=(9, 9))))
    assert len(episodes) == 4
    for episode in episodes:
        [trajectory] = episode.trajectories
        assert (episode.reward, episode.turns) == (1.5, 3)
        expected = [False] * 3 + ([True] * 4 + [False] * 2) * 2 + [True] * 4
        assert trajectory.loss_mask.tolist() == expected
        assert trajectory.token_ids[7:9].tolist() == [9, 9]
        captured = trajectory.routes.captured
        assert captured[:-1].all()  # the boundary rows were filled by the next turn
        assert not captured[-1]
    assert not np.array_equal(episodes[0].trajectories[0].token_ids, episodes[1].trajectories[0].token_ids)


def test_tokens_that_the_environment_did_not_read_leave_the_trajectory(engine: EmbeddedEngine) -> None:
    episodes = play(engine, Scripted(lambda turn, _: Turn(done=turn == 2, observation=(9,), kept=2)))
    for episode in episodes:
        [trajectory] = episode.trajectories
        assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2
        assert trajectory.token_ids[5] == 9
        assert trajectory.routes.captured[:7].all()
    for wrong in (5, -1, 1.0):
        with pytest.raises(RewardError, match=r"Turn\.kept must lie in \[0, 4\]"):
            play(engine, Scripted(lambda *_, wrong=wrong: Turn(kept=wrong)))


@pytest.mark.parametrize("turns", [2, 1])
def test_tokens_that_were_not_read_leave_rows_that_are_put_away_too(engine: EmbeddedEngine, turns: int) -> None:
    """The rows of the last turn that the config allows are put away before the environment reads its tokens."""
    config = CONFIG.model_copy(update={"max_turns": turns})
    task = Scripted(lambda *_: Turn(done=False, observation=(9,), kept=2))
    kept: list[Routes] = []

    def keep(routes: Routes) -> Routes:
        kept.append(routes)
        return routes

    whole = play(engine, task, config)
    rollout = Rollout(engine, task, [0, 1], config, max_length=64, seed=(0, 0), keep=keep)
    for episode, other in zip(rollout.run(), whole, strict=True):
        [sample], [trajectory] = episode.trajectories, other.trajectories
        assert isinstance(sample, Sample)
        assert sample.token_ids.tolist() == trajectory.token_ids.tolist()
        assert sample.loss_mask.tolist() == trajectory.loss_mask.tolist()
        assert sample.routes is not None
        assert sample.routes.read().same_sets(trajectory.routes.read())
        assert len(sample.routes) == len(sample.token_ids) == 3 * turns + 2
    assert len(kept) == 2 * len(whole)


def test_a_task_with_threads_is_stepped_by_them_and_gives_the_same_episodes(engine: EmbeddedEngine) -> None:
    together = threading.Barrier(4, timeout=60)  # passes only if four episodes are in it at once

    def answer(turn: int, tokens: Sequence[int]) -> Turn:
        together.wait()
        return Turn(float(sum(tokens)), done=turn == 2, observation=(9,))

    task = Scripted(answer)
    task.threads = 4  # type: ignore[attr-defined]
    alone = play(engine, Scripted(lambda turn, tokens: Turn(float(sum(tokens)), done=turn == 2, observation=(9,))))
    for one, other in zip(play(engine, task), alone, strict=True):
        assert (one.number, one.group, one.reward) == (other.number, other.group, other.reward)
        assert np.array_equal(one.trajectories[0].token_ids, other.trajectories[0].token_ids)


def test_the_rows_are_those_of_one_pass_over_the_whole(engine: EmbeddedEngine) -> None:
    """Three turns stitched together say the same as one prompt that holds all of it."""
    episode = play(engine, Scripted(lambda turn, _: Turn(done=turn == 3, observation=(9,))))[0]
    [trajectory] = episode.trajectories
    [whole] = engine.generate([Request(trajectory.token_ids.tolist(), Sampling(1))])
    agree = (np.sort(whole.routes.ids, -1) == np.sort(trajectory.routes.ids, -1)).all(-1)
    assert agree[:-1].mean() > 0.99  # another batch rounds otherwise


def test_a_conversation_whose_engine_dies_goes_on_with_its_rows_forced(random_model: pathlib.Path) -> None:
    asked: list[Request] = []

    class Listening(EmbeddedEngine):
        async def submit(self, request: Request) -> list[Completion]:
            asked.append(request)
            return await super().submit(request)

    engines = {
        name: make(random_model, max_length=128, eos_token_id=[])
        for name, make in (("dies", EmbeddedEngine), ("stays", Listening))
    }
    turns: list[int] = []

    def on_turn() -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            engines["dies"].close()

    task = Scripted(lambda *_: Turn(done=False, observation=(9,)), repeat=12)  # a prompt that can be recognised
    with EnginePool(engines, health_seconds=60.0) as pool:
        rollout = Rollout(pool, task, [0, 1], CONFIG, max_length=128, seed=(0, 0), on_turn=on_turn)
        episodes = rollout.run()
    assert [episode.turns for episode in episodes] == [3] * 4
    moved = [request for request in asked if request.forced_routes is not None]
    assert len(moved) == 2  # the two episodes of the problem that the engine had
    for request in moved:
        [episode] = [e for e in episodes if tuple(e.current.token_ids[: len(request.token_ids)]) == request.token_ids]
        assert request.forced_routes is not None
        rows = len(request.forced_routes)
        assert rows >= 36 + 3
        assert request.forced_routes.same_sets(episode.current.routes[:rows])


def test_changed_history_branches_and_keeps_what_was_sampled(engine: EmbeddedEngine) -> None:
    def rewrite(turn: int, tokens: Sequence[int]) -> Turn:
        return Turn(done=turn == 2, prompt=(5, 6, 3, 3) if turn == 1 else None)

    for episode in play(engine, Scripted(rewrite)):
        first, second = episode.trajectories
        assert (int(first.loss_mask.sum()), int(second.loss_mask.sum())) == (4, 4)
        assert second.token_ids[:4].tolist() == [5, 6, 3, 3]
        assert second.routes.captured[:-1].all()


def test_the_same_seed_plays_the_same_episodes(engine: EmbeddedEngine) -> None:
    task = Scripted(lambda turn, _: Turn(done=turn == 2, observation=(9,)))
    for one, other in zip(play(engine, task), play(engine, task), strict=True):
        assert np.array_equal(one.trajectories[0].token_ids, other.trajectories[0].token_ids)
        assert np.array_equal(one.trajectories[0].logprobs, other.trajectories[0].logprobs)


@pytest.mark.parametrize("seeded", [True, False])
def test_requests_have_a_seed_unless_the_config_says_otherwise(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, seeded: bool
) -> None:
    asked: list[Request] = []
    generate = engine.generate_each

    def noting(requests: Sequence[Request]) -> list[list[Completion]]:
        asked.extend(requests)
        return generate(requests)

    monkeypatch.setattr(engine, "generate_each", noting)
    play(engine, Scripted(lambda turn, _: Turn(done=True)), CONFIG.model_copy(update={"seeded": seeded}))
    assert [request.sampling.seed is not None for request in asked] == [seeded] * len(asked)
    assert asked


def test_an_episode_ends_where_the_engine_has_no_room(engine: EmbeddedEngine) -> None:
    task = Scripted(lambda turn, _: Turn(done=False, observation=(9,) * 4))
    for episode in play(engine, task, max_length=10):
        assert episode.turns == 1  # 3 + 4 + 4 tokens are more than 10
        assert not episode.done


def test_what_an_environment_raises_names_the_problem_and_keeps_the_episodes(engine: EmbeddedEngine) -> None:
    def fails(turn: int, tokens: Sequence[int]) -> Turn:
        raise ZeroDivisionError("no grader")

    rollout = Rollout(engine, Scripted(fails), [0, 1], CONFIG, max_length=64, seed=(0, 0))
    with pytest.raises(RewardError, match=r"problem 0, turn 0: Scripted.step raised ZeroDivisionError: no grader"):
        rollout.run()
    assert len(rollout.episodes[0].trajectories[0]) == 7
    with pytest.raises(RewardError, match="finite number, got nan"):
        play(engine, Scripted(lambda turn, _: Turn(reward=math.nan)))


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, KeyError])
def test_an_environment_that_ends_the_process_is_an_error_that_names_it(
    engine: EmbeddedEngine, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> Turn:
        raise kind(0)

    with pytest.raises(RewardError, match=rf"problem 0, turn 0: Scripted\.step raised {kind.__name__}: 0"):
        play(engine, Scripted(ends))
    monkeypatch.setattr(Scripted, "reset", ends)
    with pytest.raises(RewardError, match=rf"problem \d+: Scripted.* and its reset raised {kind.__name__}: 0"):
        play(engine, Scripted(lambda turn, _: Turn()))


def test_a_step_that_gives_no_turn_is_named(engine: EmbeddedEngine) -> None:
    with pytest.raises(RewardError, match=r"Scripted\.step must return a Turn, got 1\.0"):
        play(engine, Scripted(lambda turn, _: 1.0))  # type: ignore[arg-type, return-value]
    with pytest.raises(RewardError, match="a reward must be a finite number, got '1'"):
        play(engine, Scripted(lambda turn, _: Turn(reward="1")))  # type: ignore[arg-type]


def test_a_prompt_without_room_is_refused(engine: EmbeddedEngine) -> None:
    with pytest.raises(RewardError, match=r"prompt of 3 tokens leaves no room.*max_length is 3"):
        play(engine, Scripted(lambda turn, _: Turn()), max_length=3)


def test_seeds_of_neighbours_are_unrelated() -> None:
    """Engines add the sample's number to a request's seed: consecutive seeds would repeat samples."""
    seeds = [seed_of(0, step, episode, turn) for step in range(5) for episode in range(20) for turn in range(3)]
    assert len({seed + index for seed in seeds for index in range(8)}) == len(seeds) * 8
    assert all(0 <= seed < 1 << 31 for seed in seeds)
