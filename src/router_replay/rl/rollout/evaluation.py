"""Play evaluation episodes: problems that are not trained on, with one version of the weights for every token.

    evaluation = Evaluation(engine, config, tokenizer)
    result = evaluation.result(evaluation.play(), version=8, seconds=2.1)           # in the synchronous loop
    episodes = await evaluation.play_beside(submit, in_pool, version=8)             # beside the rollouts of a stream

Every evaluation asks the same problems with the same seeds. `result` refuses episodes with a token of another version.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request
from router_replay.errors import EngineError, TrainError
from router_replay.rl.config import RolloutConfig, TrainConfig
from router_replay.rl.environments import Limits, Task, make_task
from router_replay.rl.rollout.player import Episode, Player, seed_of
from router_replay.rl.rollout.prompt_lengths import check_prompt_lengths
from router_replay.rl.rollout.rollout import Rollout

STREAM = 0x45564C  # keeps the seeds of evaluations apart from those of training


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Hold what an evaluation of `version` measured."""

    version: int
    episodes: int
    reward: float
    reward_std: float
    response_length: float
    turns: float
    seconds: float

    def as_metrics(self) -> dict[str, float]:
        """Return the values by the names of the metrics."""
        return {f"evaluation/{name}": value for name, value in dataclasses.asdict(self).items()}


class Evaluation:
    """Hold the problems and settings of a run's evaluations; `task` is made by `evaluation_task`."""

    def __init__(self, engine: Engine, task: Task, config: TrainConfig, on_turn: Callable[[], object]) -> None:
        settings = config.evaluation
        self._engine, self._task, self._on_turn, self._max_length = engine, task, on_turn, config.max_length
        self._config: RolloutConfig = config.rollout.model_copy(
            update={"prompts": settings.prompts, "group": settings.group, "temperature": settings.temperature}
        )
        self._problems = [
            number % task.problems if task.problems else number for number in range(settings.prompts)
        ]  # fmt: skip
        self._seed = (config.seed, STREAM)

    def play(self) -> list[Episode]:
        """Play all episodes together, while nothing else uses the engine."""
        rollout = Rollout(
            self._engine,
            self._task,
            self._problems,
            self._config,
            max_length=self._max_length,
            seed=self._seed,
            on_turn=self._on_turn,
        )
        return rollout.run()

    async def play_beside(
        self,
        submit: Callable[[Request], Awaitable[list[Completion]]],
        in_pool: Callable[..., Awaitable[Any]],
        version: int,
    ) -> list[Episode]:
        """Play every episode in a task of its own. `submit` asks the engine, `in_pool` runs the environments.

        The caller must not change the weights before this returns. `version` is part of the requests' ids.
        """
        player = Player(self._engine, self._task, self._config, self._max_length)

        async def one(number: int) -> Episode:
            group = number // self._config.group
            episode: Episode = await in_pool(player.reset, number, group, self._problems[group])
            for turn in range(player.turns):
                if episode.done or not player.room(episode):
                    break
                seed = seed_of(*self._seed, number, turn)
                request = player.request(episode, seed, id=f"evaluation{version}.{number}.{turn}")
                [completion] = await submit(request)
                if completion.finish_reason == "abort":
                    raise EngineError(f"{request.id}: the engine aborted a request of an evaluation")
                player.append(episode, request.token_ids, completion)
                self._on_turn()
                await in_pool(player.step, episode, request.token_ids, completion.token_ids.tolist())
            return episode

        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(one(number)) for number in range(len(self._problems) * self._config.group)]
        return [task.result() for task in playing]


def result_of(episodes: Sequence[Episode], version: int, seconds: float) -> EvaluationResult:
    """Return what the episodes say of `version`. Raises TrainError if a token was sampled by another version."""
    for episode in episodes:
        others = sorted({*episode.versions.tolist()} - {version})
        if others:
            raise TrainError(
                f"the evaluation of version {version} has tokens of version {others[0]} (problem {episode.problem}): "
                "the weights of the engine changed while its episodes were played"
            )
    rewards = np.array([episode.reward for episode in episodes])
    return EvaluationResult(
        version,
        len(episodes),
        float(rewards.mean()),
        float(rewards.std()),
        float(np.mean([episode.sampled_tokens for episode in episodes])),
        float(np.mean([episode.turns for episode in episodes])),
        seconds,
    )


def evaluation_task(config: TrainConfig, tokenizer: Any) -> Task:
    """Return the problems of evaluations: those of `evaluation.file`, or those of the environment with another seed."""
    settings = config.environment
    if config.evaluation.file:
        settings = settings.model_copy(update={"file": config.evaluation.file})
    task = make_task(settings, tokenizer, seed_of(config.seed, STREAM), Limits.of(config))
    check_prompt_lengths(task, config)
    return task
