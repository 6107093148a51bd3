"""Play the episodes of a step: environments ask, the engine answers, and the answers are stitched into trajectories.

    rollout = Rollout(engine, task, problems=range(8), config=config.rollout, max_length=512, seed=(0, step))
    episodes = rollout.run()

All episodes take their turns together, with one batch of requests per turn, so the same seeds give the same batches.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request, Sampling
from router_replay.errors import EngineError, RewardError
from router_replay.rl.config import RolloutConfig
from router_replay.rl.environments.base import Environment, Task, Turn
from router_replay.rl.users_code import guarded
from router_replay.stitch import Trajectory


@dataclasses.dataclass(eq=False)
class Episode:
    """Hold one environment and what was played in it so far.

    `number` counts the episodes of a step, `group` its problems; `problem` is the number of the problem in the task.
    `prompt` is the next prompt. There are several `trajectories` if the environment rewrote its history.
    """

    number: int
    group: int
    problem: int
    environment: Environment
    prompt: tuple[int, ...]
    trajectories: list[Trajectory]
    reward: float = 0.0
    turns: int = 0
    done: bool = False

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(int(trajectory.loss_mask.sum()) for trajectory in self.trajectories)


class Rollout:
    """Play the episodes of one training step. If `run` raises, `episodes` holds what was played until then.

    `problems` are the problem numbers, each of which gets `config.group` episodes. `max_length` limits prompt and
    completion together. `seed` decides all samples of the step. `on_turn` is called before each turn.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        problems: Sequence[int],
        config: RolloutConfig,
        *,
        max_length: int,
        seed: Sequence[int],
        on_turn: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._task, self._config = engine, task, config
        self._max_length = max_length
        self._seed, self._on_turn = seed, on_turn
        self.seconds_in_environments = 0.0
        self.episodes: list[Episode] = []
        for group, problem in enumerate(problems):
            for _ in range(config.group):
                self.episodes.append(self._reset(group, problem))

    def run(self) -> list[Episode]:
        """Play all episodes to their end."""
        for turn in range(self._config.turns_of(self._task)):
            waiting = [episode for episode in self.episodes if not episode.done and self._room(episode)]
            if not waiting:
                break
            self._on_turn()
            requests = self._first_requests() if turn == 0 else [self._request(e, turn) for e in waiting]
            completions = self._engine.generate(requests)
            if len(completions) != len(waiting):
                raise EngineError(f"expected {len(waiting)} completions, one per episode, got {len(completions)}")
            prompts = [request.token_ids for request in requests for _ in range(request.sampling.n)]
            turns = list(zip(waiting, prompts, completions, strict=True))
            for turn_of in turns:  # append all completions first, so that they are kept if an environment raises
                self._append(*turn_of)
            for turn_of in turns:
                self._take(*turn_of)
        return self.episodes

    # -- asking ---------------------------------------------------------------------------------

    def _reset(self, group: int, problem: int) -> Episode:
        with guarded(f"problem {problem}: {type(self._task).__name__}.environment and its reset", RewardError):
            environment = self._task.environment()
            prompt = tuple(int(token) for token in environment.reset(problem))
        episode = Episode(len(self.episodes), group, problem, environment, prompt, [Trajectory(self._engine.spec)])
        if not self._room(episode):
            raise RewardError(
                f"problem {problem}: its prompt of {len(prompt)} tokens leaves no room for an answer: "
                f"engine.max_length is {self._max_length}; raise it, or use shorter prompts"
            )
        if self.episodes and self.episodes[-1].group == group and self.episodes[-1].prompt != prompt:
            raise RewardError(f"problem {problem}: reset must return the same prompt each time, got two different ones")
        return episode

    def _room(self, episode: Episode) -> int:
        return max(0, min(self._config.max_tokens, self._max_length - len(episode.prompt)))

    def _first_requests(self) -> list[Request]:
        """Return one request per group: its episodes share a prompt, so the engine computes it once."""
        return [self._request(episode, 0, n=self._config.group) for episode in self.episodes[:: self._config.group]]

    def _request(self, episode: Episode, turn: int, n: int = 1) -> Request:
        sampling = Sampling(
            max_tokens=self._room(episode),
            temperature=self._config.temperature,
            seed=seed_of(*self._seed, episode.number, turn),
            stop_token_ids=self._task.stop_token_ids,
            n=n,
        )
        start = episode.trajectories[-1].start_for(episode.prompt) if self._engine.capabilities.start else 0
        return Request(episode.prompt, sampling, start=start)

    # -- taking ---------------------------------------------------------------------------------

    def _append(self, episode: Episode, prompt: Sequence[int], completion: Completion) -> None:
        if completion.finish_reason == "abort":
            raise EngineError(f"{completion.request_id}: the engine aborted a request that the trainer did not abort")
        current = episode.trajectories[-1]
        taken = current.append(
            prompt,
            completion.token_ids,
            completion.logprobs,
            completion.routes,
            completion.start,
            branch=True,
        )
        if taken is not current:
            episode.trajectories.append(taken)

    def _take(self, episode: Episode, prompt: Sequence[int], completion: Completion) -> None:
        turn = self._step(episode, completion.token_ids.tolist())
        episode.reward += turn.reward
        episode.turns += 1
        episode.done = turn.done
        so_far = (*prompt, *completion.token_ids.tolist())
        episode.prompt = turn.prompt if turn.prompt is not None else (*so_far, *turn.observation)

    def _step(self, episode: Episode, tokens: list[int]) -> Turn:
        started = time.perf_counter()
        name = f"{type(episode.environment).__name__}.step"
        try:
            with guarded(f"problem {episode.problem}, turn {episode.turns}: {name}", RewardError):
                turn = episode.environment.step(tokens)
        finally:
            self.seconds_in_environments += time.perf_counter() - started
        if not isinstance(turn, Turn):
            raise RewardError(f"problem {episode.problem}: {name} must return a Turn, got {turn!r:.80}")
        if not isinstance(turn.reward, int | float | np.number) or not math.isfinite(turn.reward):
            raise RewardError(f"problem {episode.problem}: a reward must be a finite number, got {turn.reward!r}")
        return turn


def seed_of(*numbers: int) -> int:
    """Return a seed for one request. Nearby numbers give unrelated seeds: engines add the sample index to the seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1
