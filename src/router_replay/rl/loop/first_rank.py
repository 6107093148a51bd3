"""Do the work that one process does for all: problems, engine, rollouts, weights for the engine, metrics."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from router_replay.engines.base import Engine
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.engine_start import start_engine
from router_replay.rl.environments import make_task
from router_replay.rl.log.display import Display, Quiet
from router_replay.rl.log.metrics import MetricsWriter
from router_replay.rl.loop.phases import Phases
from router_replay.rl.loop.speed import Speed
from router_replay.rl.loop.step_values import step_values
from router_replay.rl.policy import delivery
from router_replay.rl.policy.base import BasePolicy
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.rollout import Episode, Rollout
from router_replay.rl.rollout.episodes import samples_of
from router_replay.rl.rollout.prompt_lengths import check_prompt_lengths
from router_replay.rl.state.checkpoints import Progress
from router_replay.rl.state.run_record import record_of
from router_replay.rl.weights.sync import WeightSync


class FirstRank:
    """Do the first rank's work.

    The constructor reads the problems. `start` starts the engine, for which the policy must be loaded.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Any,
        checkpoint: pathlib.Path | None,
        progress: Progress,
        note: Callable[[str], object],
    ) -> None:
        self._config = config
        self._rollout: Rollout | None = None
        self._lengths: list[int] = []  # of the sequences of the running step
        self._task = make_task(config.environment, tokenizer, config.seed)
        notes = check_prompt_lengths(self._task, config)
        self.record, changes = record_of(config, self._task, checkpoint, progress.step)
        for text in [*notes, *changes]:
            note(text)

    def start(
        self,
        policy: BasePolicy,
        state: Mapping[str, torch.Tensor],
        progress: Progress,
        display: Display | Quiet,
        closing: contextlib.ExitStack,
    ) -> None:
        """Open the metrics and start the engine with the weights of `state`. `closing` closes both."""
        config, self._policy, self._display = self._config, policy, display
        self._speed = Speed(config, policy)
        self._writer = closing.enter_context(
            MetricsWriter(config.output, config.logging, self.record.for_config_file(), done=progress.step)
        )
        self._sync = WeightSync(
            config.engine,
            policy.model,
            policy.router_names,
            float32_routers=config.model.router_dtype == "float32",
        )
        closing.callback(self._sync.close)
        exported = self._sync.export(state, progress.version)
        self.engine: Engine = closing.enter_context(start_engine(config, exported, policy.spec, progress.version))

    @property
    def episodes(self) -> list[Episode]:
        """Return the rollouts of the running step; the list is empty once the step's metrics are written."""
        return [] if self._rollout is None else self._rollout.episodes

    def play(self, progress: Progress, ranks: Ranks, phases: Phases) -> list[Episode]:
        """Play this step's problems and return the rollouts with their rewards."""
        config, first = self._config, progress.problem
        self._rollout = None  # the rollouts of the last step were already used
        problems = [
            number % self._task.problems if self._task.problems else number
            for number in range(first, first + config.rollout.prompts)
        ]
        with phases.phase("rollout"):
            self._rollout = Rollout(
                self.engine,
                self._task,
                problems,
                config.rollout,
                max_length=config.engine.max_length,
                seed=(config.seed, progress.step),
                on_turn=ranks.watch.beat,
            )
            episodes = self._rollout.run()
        phases.seconds["seconds/reward"] = self._rollout.seconds_in_environments
        phases.seconds["seconds/rollout"] -= self._rollout.seconds_in_environments
        return episodes

    def plan(self, episodes: list[Episode], progress: Progress, ranks: Ranks) -> list[list[MiniBatch]]:
        """Compute advantages and mini-batches, and return the share of every rank."""
        config = self._config
        wanted = config.replay == "r3" or (config.trainer.agreement and self.engine.capabilities.routes)
        samples, numbers = samples_of(episodes, config, wanted)
        self._lengths = [len(sample) for sample in samples]
        parts = delivery.split(samples, numbers, config.optimizer.mini_batches, (config.seed, progress.step))
        on_missing = config.rollout.on_missing if config.replay == "r3" else "live"  # otherwise only for comparison
        policy, most = self._policy, config.trainer.max_tokens
        return delivery.plan(parts, ranks, most, on_missing, policy.one_at_a_time, policy.row_multiple)

    def push(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Give the engine the new weights."""
        self._sync.push(self.engine, state, version)

    def report(
        self,
        progress: Progress,
        figures: Sequence[dict[str, float]],
        logprobs: Sequence[np.ndarray],
        routes: Stats,
        seconds: Mapping[str, float],
        ranks: Ranks,
    ) -> None:
        """Write and show the metrics of the step that was just done."""
        values = step_values(self._config, self.episodes, figures, logprobs, routes)
        values |= {"version": progress.version, **seconds}
        values["tokens_per_second"] = values["tokens"] / seconds["seconds/step"]
        values |= self._speed.of_step(self._lengths, seconds, ranks)
        self._writer.write(progress.step - 1, values)
        self._display.step(progress.step - 1, values)
        self._rollout = None
