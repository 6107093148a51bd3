"""Play one episode turn by turn: ask the engine, stitch its answer, and let the environment step.

    episode = player.reset(number=0, group=0, problem=7)
    request = player.request(episode, seed)
    player.append(episode, request.token_ids, completion)
    player.step(episode, request.token_ids, completion.token_ids)

Both loops are made of these calls. `rollout.py` plays the episodes of a step together, `stream.py` each by itself.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from router_replay.batch import Sample
from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request, Sampling
from router_replay.errors import RewardError
from router_replay.rl.config import RolloutConfig
from router_replay.rl.environments.base import Environment, Task, Turn
from router_replay.rl.users_code import guarded
from router_replay.route_source import RouteSource
from router_replay.routes import Routes
from router_replay.stitch import Trajectory

Keep: TypeAlias = Callable[[Routes], RouteSource]
"""What puts the rows of a finished trajectory away, and returns where they can be read."""


@dataclasses.dataclass(eq=False)
class Episode:
    """Hold one environment and what was played in it so far.

    `number` counts the episodes of a step, `group` its problems; `problem` is the number of the problem in the task.
    `prompt` is the next prompt. There are several `trajectories` if the environment rewrote its history. An episode
    whose rows were put away, or that was read from a file, has Samples in their place.
    """

    number: int
    group: int
    problem: int
    environment: Environment | None
    prompt: tuple[int, ...]
    trajectories: list[Trajectory | Sample]
    reward: float = 0.0
    turns: int = 0
    done: bool = False

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(int(trajectory.loss_mask.sum()) for trajectory in self.trajectories)

    @property
    def versions(self) -> np.ndarray:
        """Return the policy version of every sampled token."""
        found = [np.asarray(trajectory.versions)[trajectory.loss_mask] for trajectory in self.trajectories]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @property
    def current(self) -> Trajectory:
        """Return the trajectory that the next answer extends."""
        current = self.trajectories[-1]
        assert isinstance(current, Trajectory)
        return current


class Player:
    """Hold what all episodes share: engine, task and settings. `max_length` limits prompt and completion together.

    `step` and `reset` call the user's code, and may be called in several threads for different episodes. `keep` puts
    the rows of finished trajectories away; None if they stay in this process.
    """

    def __init__(
        self, engine: Engine, task: Task, config: RolloutConfig, max_length: int, keep: Keep | None = None
    ) -> None:
        self.seconds_in_environments = 0.0
        self._keep = keep
        self._engine, self._task, self._config, self._max_length = engine, task, config, max_length

    @property
    def turns(self) -> int:
        """Return the maximum number of turns of an episode."""
        return self._config.turns_of(self._task)

    @property
    def puts_away(self) -> bool:
        """Return whether `put_away` has something to do."""
        return self._keep is not None

    def reset(self, number: int, group: int, problem: int) -> Episode:
        """Start an episode of a problem."""
        with guarded(f"problem {problem}: {_name(self._task)}.environment and its reset", RewardError):
            environment = self._task.environment()
            prompt = tuple(int(token) for token in environment.reset(problem))
        episode = Episode(number, group, problem, environment, prompt, [Trajectory(self._engine.spec)])
        if not self.room(episode):
            raise RewardError(
                f"problem {problem}: its prompt of {len(prompt)} tokens leaves no room for an answer: "
                f"engine.max_length is {self._max_length}; raise it, or use shorter prompts"
            )
        return episode

    def refuse_other_prompt(self, episode: Episode, prompt: tuple[int, ...]) -> None:
        """Raise RewardError unless the episode starts with `prompt`, that of another episode of its group."""
        if episode.prompt != prompt:
            raise RewardError(
                f"problem {episode.problem}: reset must return the same prompt each time, got two different ones"
            )

    def room(self, episode: Episode) -> int:
        """Return how many tokens the next turn may sample."""
        return max(0, min(self._config.max_tokens, self._max_length - len(episode.prompt)))

    def request(
        self,
        episode: Episode,
        seed: int,
        n: int = 1,
        more: Sequence[int] = (),
        forced: bool = False,
        id: str | None = None,
    ) -> Request:
        """Return the request of the next turn.

        `more` are tokens of this turn that were already sampled, before an abort. With `forced` the engine is made to
        use the rows that are known of the prompt. `id` is the request's; a new one by default.
        """
        prompt = (*episode.prompt, *more)
        sampling = Sampling(
            max_tokens=self.room(episode) - len(more),
            temperature=self._config.temperature,
            seed=seed if self._config.seeded else None,
            stop_token_ids=self._task.stop_token_ids,
            n=n,
        )
        known = episode.current.start_for(prompt) if len(episode.current) else 0
        routes = episode.current.routes[:known] if known else None
        start = known if self._engine.capabilities.start else 0
        forced_routes = routes if forced else None
        if id is None:
            return Request(prompt, sampling, start, forced_routes, known_routes=routes)
        return Request(prompt, sampling, start, forced_routes, id, known_routes=routes)

    def append(self, episode: Episode, prompt: Sequence[int], completion: Completion) -> None:
        """Stitch the answer to `prompt` to the episode."""
        current = episode.current
        taken = current.add(Request(prompt), completion, branch=True)
        if taken is not current:
            episode.trajectories.append(taken)

    def step(self, episode: Episode, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Give the environment the `tokens` that were sampled after `prompt`, and take its answer."""
        turn = self._turn(episode, list(tokens))
        episode.reward += turn.reward
        episode.turns += 1
        episode.done = turn.done
        if turn.kept is not None and turn.kept < len(tokens):
            self._truncate(episode, len(prompt) + turn.kept)
            tokens = tokens[: turn.kept]
        episode.prompt = turn.prompt if turn.prompt is not None else (*prompt, *tokens, *turn.observation)

    def put_away(self, episode: Episode) -> None:
        """Put the rows of an episode away that no request extends any more. It may wait for room."""
        if self._keep is None:
            return
        for number, one in enumerate(episode.trajectories):
            if isinstance(one, Trajectory) and len(one):
                episode.trajectories[number] = Sample(
                    one.token_ids, one.logprobs, one.loss_mask, self._keep(one.routes), versions=one.versions
                )

    def _truncate(self, episode: Episode, length: int) -> None:
        """Leave the first `length` tokens of the last trajectory, whose rows may be put away already."""
        last = episode.trajectories[-1]
        if isinstance(last, Trajectory):
            last.truncate(length)
            return
        assert self._keep is not None
        assert last.routes is not None
        episode.trajectories[-1] = Sample(
            last.token_ids[:length],
            last.logprobs[:length],
            last.loss_mask[:length],
            self._keep(last.routes.read(0, length)),
            versions=np.asarray(last.versions)[:length],
        )

    def _turn(self, episode: Episode, tokens: list[int]) -> Turn:
        assert episode.environment is not None
        started = time.perf_counter()
        name = f"{_name(episode.environment)}.step"
        try:
            with guarded(f"problem {episode.problem}, turn {episode.turns}: {name}", RewardError):
                turn = episode.environment.step(tokens)
        finally:
            self.seconds_in_environments += time.perf_counter() - started
        if not isinstance(turn, Turn):
            raise RewardError(f"problem {episode.problem}: {name} must return a Turn, got {turn!r:.80}")
        if not isinstance(turn.reward, int | float | np.number) or not math.isfinite(turn.reward):
            raise RewardError(f"problem {episode.problem}: a reward must be a finite number, got {turn.reward!r}")
        if turn.kept is not None and not (type(turn.kept) is int and 0 <= turn.kept <= len(tokens)):
            raise RewardError(
                f"problem {episode.problem}: Turn.kept must lie in [0, {len(tokens)}], the number of sampled tokens, "
                f"got {turn.kept!r}"
            )
        return turn


def _name(made: Task | Environment) -> str:
    """Return the name of the user's class in messages; what stands for it in this process knows it."""
    return getattr(made, "name", None) or type(made).__name__


def seed_of(*numbers: int) -> int:
    """Return a seed for one request. Nearby numbers give unrelated seeds: engines add the sample index to the seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1
