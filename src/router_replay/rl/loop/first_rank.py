"""Do the work that one process does for all: problems, engine, rollouts, weights for the engine, metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from router_replay.engines.base import Engine
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.errors import ConfigError
from router_replay.measure import RouterFigures
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.engine_set import EngineSet
from router_replay.rl.environments import Limits, Task, make_task
from router_replay.rl.log.display import Display, Quiet
from router_replay.rl.log.evaluations import EvaluationLog
from router_replay.rl.log.metrics import MetricsWriter
from router_replay.rl.loop.phases import Phases
from router_replay.rl.loop.routing_values import OutOfLine
from router_replay.rl.loop.speed import Speed
from router_replay.rl.loop.step_values import step_values
from router_replay.rl.policy import delivery
from router_replay.rl.policy.base import BasePolicy
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.rollout import Episode, Rollout
from router_replay.rl.rollout.episodes import samples_of
from router_replay.rl.rollout.evaluation import Evaluation, EvaluationResult, evaluation_task, result_of
from router_replay.rl.rollout.groups import version_figures
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.order import Follower, Order, Recorder
from router_replay.rl.rollout.player import Keep
from router_replay.rl.rollout.prompt_lengths import check_prompt_lengths
from router_replay.rl.rollout.recorded import RecordedSteps, TrajectoryRecorder
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state import checkpoints
from router_replay.rl.state.checkpoints import Progress
from router_replay.rl.state.journal import Journal
from router_replay.rl.state.journal import read as read_journal
from router_replay.rl.state.run_record import record_of
from router_replay.rl.state.schedule import ScheduleWriter, head_of, path_in, read_schedule


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
        self._stream: RolloutStream | None = None  # with loop = "async"
        self._taken: list[Episode] = []  # of the running step, from the stream or a recording
        self._keep: Keep | None = None  # with Ray, the rows of finished episodes are in its object store
        self._lengths: list[int] = []  # of the sequences of the running step
        self._evaluated: dict[str, float] = {}  # what an evaluation measured, for the next line of metrics
        self._out_of_line = OutOfLine()
        self._task = make_task(config.environment, tokenizer, config.seed, Limits.of(config))
        notes = check_prompt_lengths(self._task, config)
        self._evaluation_task = evaluation_task(config, tokenizer) if config.evaluation.every else None
        self._evaluations: EvaluationLog | None = None
        self._saved = _saved_rollouts(config, progress)
        self._recorded = RecordedSteps(config) if config.rollout.replay_from else None
        self._recorder = (
            TrajectoryRecorder(config, progress.step, resumed=checkpoint is not None) if config.record else None
        )
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
        on_turn: Callable[[], object] = lambda: None,
    ) -> None:
        """Open the metrics and start the engine with the weights of `state`. `closing` closes both.

        With `loop = "async"` rollouts start too; `on_turn` is called after each of their turns. With
        `rollout.replay_from` there is no engine.
        """
        config, self._policy, self._display = self._config, policy, display
        self._speed = Speed(config, policy)
        self._writer = closing.enter_context(
            MetricsWriter(config.output, config.logging, self.record.for_config_file(), done=progress.step)
        )
        closing.callback(getattr(self._task, "close", lambda: None))
        if self._recorder is not None:
            closing.callback(self._recorder.close)
        if self._recorded is not None:
            self._recorded.refuse_other_model(policy.spec)
            return
        self._sync = EngineSet(config, policy.model, policy.router_names, policy.gpu)
        closing.callback(self._sync.close)
        self.engine: Engine = closing.enter_context(self._sync.start(state, policy.spec, progress.version))
        for words in sorted(set(self._sync.ways.values())):
            names = [name for name, own in self._sync.ways.items() if own == words]
            of = "" if len(names) == len(self._sync.ways) else f" of {', '.join(names)}"
            display.fact(f"new weights{of}: {words}")
        if config.cluster.kind == "ray":
            from router_replay.rl.cluster.routes import keeper

            self._keep = keeper(config, self.engine.spec)
        if config.cluster.environments:
            from router_replay.rl.cluster.environments import RayTask

            self._task = cast(Task, RayTask(self._task, config))
        if self._evaluation_task is not None:
            self._evaluation = Evaluation(self.engine, self._evaluation_task, config, on_turn)
            self._evaluations = closing.enter_context(EvaluationLog(config.output, progress.version))
        if config.loop == "async":
            self._stream = closing.enter_context(self._open_stream(progress, on_turn))

    def _open_stream(self, progress: Progress, on_turn: Callable[[], object]) -> RolloutStream:
        """Return the stream of rollouts, with what an earlier process left in the journal."""
        config, journal = self._config, Journal(self._config.output)
        finished: list[tuple[int, int, Episode]] = []
        if progress.rollouts is not None:
            finished = read_journal(config.output, progress.step, progress.version, self.engine.spec, self._keep)
        stream = RolloutStream(
            self.engine, self._task, config, journal, self._saved, finished,
            version=progress.version, on_turn=on_turn, order=self._order(progress), keep=self._keep,
        )  # fmt: skip
        stream.begin_journal(progress.step)
        return stream

    def _order(self, progress: Progress) -> Order:
        """Return what records or decides the order of events; only an embedded engine can do either."""
        if not isinstance(self.engine, EmbeddedEngine):
            return Order()
        config, head = self._config, head_of(self._config, progress.step, progress.version)
        if not config.asynchronous.schedule:
            return Recorder(ScheduleWriter(config.output, head))
        path = pathlib.Path(config.asynchronous.schedule)
        events = read_schedule(path, head)
        if path.resolve() == path_in(config.output, progress.step).resolve():
            raise ConfigError(
                f"asynchronous.schedule = {str(path)!r} is the file that this run writes: copy it away first"
            )
        return Follower(ScheduleWriter(config.output, head), events, str(path))

    @property
    def episodes(self) -> list[Episode]:
        """Return the rollouts of the running step; the list is empty once the step's metrics are written."""
        return self._taken if self._rollout is None else self._rollout.episodes

    def play(self, progress: Progress, ranks: Ranks, phases: Phases) -> list[Episode]:
        """Play this step's problems and return the rollouts with their rewards."""
        episodes = self._play(progress, ranks, phases)
        if self._recorder is not None:
            self._recorder.write(progress.step, episodes)
        return episodes

    def _play(self, progress: Progress, ranks: Ranks, phases: Phases) -> list[Episode]:
        config, first = self._config, progress.problem
        self._rollout = None  # the rollouts of the last step were already used
        if self._recorded is not None:
            with phases.phase("rollout"):
                self._taken = self._recorded.episodes(progress.step)
            return self._taken
        if self._stream is not None:
            with phases.phase("rollout"):
                self._taken = self._stream.take(progress.version)
            return self._taken
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
                max_length=config.max_length,
                seed=(config.seed, progress.step),
                on_turn=ranks.watch.beat,
                keep=self._keep,
                threads=max(1, config.cluster.environments),
            )
            episodes = self._rollout.run()
        phases.seconds["seconds/reward"] = self._rollout.seconds_in_environments
        phases.seconds["seconds/rollout"] -= self._rollout.seconds_in_environments
        return episodes

    def plan(self, episodes: list[Episode], progress: Progress, ranks: Ranks) -> list[list[MiniBatch]]:
        """Compute advantages and mini-batches, and return the share of every rank."""
        config = self._config
        known = self._recorded.has_routes if self._recorded is not None else self.engine.capabilities.routes
        wanted = config.replay == "r3" or (config.trainer.agreement and known)
        samples, numbers = samples_of(episodes, config, wanted)
        self._lengths = [len(sample) for sample in samples]
        parts = delivery.split(samples, numbers, config.optimizer.mini_batches, (config.seed, progress.step))
        on_missing = config.rollout.on_missing if config.replay == "r3" else "live"  # otherwise only for comparison
        policy, most = self._policy, config.trainer.max_tokens
        return delivery.plan(
            parts, ranks, most, on_missing, policy.one_at_a_time, policy.row_multiple, version=progress.version
        )

    def push(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Give the engine, if there is one, the new weights."""
        if self._recorded is not None:
            return
        if self._stream is None:
            self._sync.push(self.engine, state, version)
        else:
            self._stream.new_weights(version, lambda kept: self._sync.push(self.engine, state, version, kept))
            self._note_evaluation(self._stream.evaluated())

    def evaluate(self, progress: Progress) -> None:
        """Evaluate the version of `progress`, unless an earlier process did. With `loop = "async"` it only begins here.

        Training goes on beside it; `push` waits for its end before the weights change.
        """
        if self._evaluations is None or progress.version in self._evaluations.versions:
            return
        if self._stream is None:
            started = time.perf_counter()
            episodes = self._evaluation.play()
            self._note_evaluation(result_of(episodes, progress.version, time.perf_counter() - started))
            return
        self._stream.evaluate(self._evaluation)
        if progress.step >= self._config.steps:
            self._note_evaluation(self._stream.evaluated())

    def _note_evaluation(self, result: EvaluationResult | None) -> None:
        if result is not None and self._evaluations is not None:
            self._evaluations.add(result)
            self._evaluated = result.as_metrics()

    def for_checkpoint(self, progress: Progress) -> Progress:
        """Return the progress with the state of the rollouts, whose finished episodes are then in the journal."""
        if self._stream is None:
            return progress
        state = self._stream.snapshot(progress.step)
        return dataclasses.replace(progress, problem=state.next_group, rollouts=state.as_json())

    def checkpoint_is_written(self) -> None:
        """Remove the parts of the journal that no checkpoint on disk needs."""
        if self._stream is not None and (kept := checkpoints.found(self._config.output)):
            self._stream.prune_journal(int(kept[0].name.partition("_")[2]))

    def stop(self) -> None:
        """End the rollouts. Finished episodes stay in the journal for a later `--resume`."""
        if self._stream is not None:
            self._stream.stop()

    def report(
        self,
        progress: Progress,
        figures: Sequence[dict[str, float]],
        logprobs: Sequence[np.ndarray],
        routes: Stats,
        routers: RouterFigures | None,
        seconds: Mapping[str, float],
        ranks: Ranks,
    ) -> None:
        """Write and show the metrics of the step that was just done."""
        values = step_values(self._config, self.episodes, figures, logprobs, routes, routers)
        values |= {"version": progress.version, **seconds}
        if self._stream is not None:
            values |= self._stream.figures()
            values |= version_figures(self.episodes, progress.version - 1)
            values["async/trainer_idle"] = seconds["seconds/rollout"] / seconds["seconds/step"]
        if self._recorded is None:
            values["sync/cuda_ipc"] = self._sync.by_cuda_ipc
            values["sync/share_of_step"] = seconds["seconds/sync"] / seconds["seconds/step"]
        values["tokens_per_second"] = values["tokens"] / seconds["seconds/step"]
        values |= self._speed.of_step(self._lengths, seconds, ranks)
        values |= self._evaluated
        self._evaluated = {}
        self._writer.write(progress.step - 1, values)
        self._display.step(progress.step - 1, values)
        for warning in self._out_of_line.warnings(routes, progress.step - 1):
            self._display.note(warning)
        self._rollout, self._taken = None, []


def _saved_rollouts(config: TrainConfig, progress: Progress) -> StreamState:
    """Return the state of the rollouts in the checkpoint; that of a new run if there is none."""
    if progress.rollouts is None:
        return StreamState(Ledger(), progress.problem)
    state = StreamState.read(progress.rollouts)
    if config.loop == "sync" and state.open:
        raise ConfigError(
            f'loop = "sync": the checkpoint has {len(state.open)} groups of episodes that were started and not '
            'trained, which only loop = "async" takes over; set it back, or set another output'
        )
    return state
