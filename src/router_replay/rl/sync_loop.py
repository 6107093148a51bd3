"""The synchronous loop: rollout, reward, advantage, old log-probs, mini-batch updates, weight sync; again.

Every rank runs it. The first rank also has the engine, the environments and the files. Read `SyncLoop.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from router_replay.engines.base import Engine
from router_replay.errors import ConfigError, RouterReplayError, TrainError
from router_replay.rl import checkpoints, delivery, ranks
from router_replay.rl.checkpoints import CheckpointError, Progress
from router_replay.rl.config import TrainConfig
from router_replay.rl.config.checks import check_config
from router_replay.rl.delivery import MiniBatch
from router_replay.rl.engine_start import start_engine
from router_replay.rl.environments import make_task
from router_replay.rl.interrupts import Interrupts
from router_replay.rl.log.display import Display, Quiet
from router_replay.rl.log.metrics import MetricsWriter
from router_replay.rl.models import LoadError, load_tokenizer, model_folder, whole_state
from router_replay.rl.policy import NotFiniteError, Policy, Scored, old_and_rollout
from router_replay.rl.ranks import Ranks
from router_replay.rl.rollout import Episode, Rollout
from router_replay.rl.rollout.episodes import samples_of, save_episodes
from router_replay.rl.rollout.prompt_lengths import check_prompt_lengths
from router_replay.rl.run_folder import hold
from router_replay.rl.run_record import record_of
from router_replay.rl.step_values import step_values
from router_replay.rl.weights import WeightSync

CHECKPOINT = "seconds/checkpoint"  # is told in the line of the step after it


def train(config: TrainConfig, resume: bool = False) -> Progress:
    """Run to the end, or raise with what there is saved. One call per process; torchrun makes several."""
    warnings = check_config(config, ranks.world_size())
    here = ranks.join(config)
    _leave_the_engine_a_core(config, here)
    failed = True
    try:
        progress = _run(config, here, resume, warnings)
        failed = False
        return progress
    except BaseException as error:
        raise here.watch.failed(_not_an_exit(error)) from error.__cause__
    finally:
        ranks.leave(here, failed)


def _run(config: TrainConfig, here: Ranks, resume: bool, warnings: Sequence[str]) -> Progress:
    with contextlib.ExitStack() as held:
        note = held.enter_context(hold(config.output)) if here.is_first else None
        with SyncLoop(config, here, resume, [*warnings, *filter(None, [note])]) as loop:
            return loop.run()


def _not_an_exit(error: BaseException) -> BaseException:
    """sys.exit inside a run would end it with a status of the caller's choice, 0 among them, and without a word."""
    if isinstance(error, SystemExit):
        return TrainError(f"something in this run called sys.exit({error.code!r}); a run ends by raising")
    return error


def _leave_the_engine_a_core(config: TrainConfig, here: Ranks) -> None:
    """On a CPU, threads that wait for each other while vLLM has their core make a step ten times slower."""
    if here.device.type == "cpu" and config.engine.kind == "vllm" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - 1)))


class SyncLoop:
    """One rank's side of a run, from its start to its last checkpoint."""

    def __init__(self, config: TrainConfig, here: Ranks, resume: bool, warnings: Sequence[str] = ()) -> None:
        self._config, self._ranks = config, here
        self._closing = contextlib.ExitStack()
        self._agreed: BaseException | None = None
        self._rollout: Rollout | None = None
        self._updating = False
        self._seconds: dict[str, float] = {}
        checkpoint = self._checkpoint_to_resume(resume)
        self.progress = Progress() if checkpoint is None else checkpoints.read_progress(checkpoint)
        self._saved = self.progress.step if checkpoint is not None else None
        title = f"{config.output.name}: replay {config.replay}"
        self._display: Display | Quiet = Quiet()
        if here.is_first:
            self._display = Display(config.steps, title, done=self.progress.step)
        self._closing.enter_context(self._display)
        here.watch.give_up = self._closing.close
        with self._end_on_error():
            for warning in warnings:
                self._display.note(warning)
            self._load(checkpoint)
            state = whole_state(self.policy.model)
            if here.is_first:
                self._start_first_rank(state)

    def _load(self, checkpoint: pathlib.Path | None) -> None:
        """The policy; on the first rank first what costs nothing and may be refused: the problems and the settings."""
        self._say("loading the model")
        folder = checkpoint or model_folder(self._config.model.path)
        try:
            self._tokenizer = load_tokenizer(folder)
            if self._ranks.is_first:
                self._read_problems(checkpoint)
            self.policy = Policy(self._config, self._ranks, folder)
        except LoadError as error:
            raise (error if checkpoint is None else checkpoints.damaged(checkpoint, error.file, error)) from error
        if checkpoint is not None:
            checkpoints.restore(self.policy, checkpoint)

    def _read_problems(self, checkpoint: pathlib.Path | None) -> None:
        config = self._config
        self._task = make_task(config.environment, self._tokenizer, config.seed)
        notes = check_prompt_lengths(self._task, config)
        self._record, changes = record_of(config, self._task, checkpoint, self.progress.step)
        for note in [*notes, *changes]:
            self._display.note(note)

    def _start_first_rank(self, state: dict[str, Any]) -> None:
        config = self._config
        self._say("starting the engine")
        self._writer = self._closing.enter_context(
            MetricsWriter(config.output, config.logging, self._record.for_config_file(), done=self.progress.step)
        )
        self._sync = WeightSync(config.engine, self.policy.model, self.policy.replayer.router_names)
        self._closing.callback(self._sync.close)
        exported = self._sync.export(state, self.progress.version)
        self.engine: Engine = self._closing.enter_context(
            start_engine(config, exported, self.policy.replayer.spec, self.progress.version)
        )

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> Progress:
        config, policy = self._config, self.policy
        with Interrupts(at_once=self._ranks.world == 1) as interrupts, self._saving_on_failure():
            while self.progress.step < config.steps:
                started = time.perf_counter()
                self._seconds = {name: value for name, value in self._seconds.items() if name == CHECKPOINT}
                minis = self._from_first(lambda: self._plan(self._play(self.progress.step)))
                with self._phase("score"):
                    scored = [policy.score(mini) for mini in minis]
                with interrupts.held():
                    self._updating = True
                    with self._phase("update"):
                        figures = [policy.update(mini, old) for mini, old in zip(minis, scored, strict=True)]
                    self.progress, self._updating = self._next(self.progress), False
                    with self._phase("sync"):
                        failure = self._push()
                    # Before the checkpoint: a step that need not run again has its line, whenever the run is killed.
                    self._report(figures, minis, scored, time.perf_counter() - started)
                    self._seconds, self._rollout = {}, None
                    if failure is not None:
                        raise failure
                    if config.checkpoint.every and self.progress.step % config.checkpoint.every == 0:
                        self._save()
                if self._ranks.any(interrupts.asked):
                    self._agreed = KeyboardInterrupt()
                    raise self._agreed
            if self._saved != self.progress.step:
                self._save()
        return self.progress

    def _play(self, step: int) -> list[Episode]:
        """The first rank: rollouts of this step's problems."""
        config, first = self._config, self.progress.problem
        self._rollout = None  # those of the last step are learned from
        problems = [
            number % self._task.problems if self._task.problems else number
            for number in range(first, first + config.rollout.prompts)
        ]
        with self._phase("rollout"):
            self._rollout = Rollout(
                self.engine,
                self._task,
                problems,
                config.rollout,
                max_length=config.engine.max_length,
                seed=(config.seed, step),
                on_turn=self._ranks.watch.beat,
            )
            episodes = self._rollout.run()
        self._seconds["seconds/reward"] = self._rollout.seconds_in_environments
        self._seconds["seconds/rollout"] -= self._rollout.seconds_in_environments
        return episodes

    def _plan(self, episodes: list[Episode]) -> list[list[MiniBatch]]:
        """The first rank: advantages, mini-batches, and the share of every rank."""
        config = self._config
        wanted = config.replay == "r3" or (config.trainer.agreement and self.engine.capabilities.routes)
        samples, numbers = samples_of(episodes, config, wanted)
        parts = delivery.split(samples, numbers, config.optimizer.mini_batches, (config.seed, self.progress.step))
        on_missing = config.rollout.on_missing if config.replay == "r3" else "live"  # else only for comparing
        return delivery.plan(parts, self._ranks, config.trainer.max_tokens, on_missing, self.policy.one_at_a_time)

    def _next(self, progress: Progress) -> Progress:
        return Progress(
            step=progress.step + 1,
            version=progress.version + 1,
            problem=progress.problem + self._config.rollout.prompts,
            updates=self.policy.updates,
        )

    def _push(self) -> BaseException | None:
        """New weights for the engine. A failure is given back: the step is done, and has its line to be written."""
        state = whole_state(self.policy.model)
        _, failure = self._on_first(lambda: self._sync.push(self.engine, state, self.progress.version))
        return failure

    def _save(self) -> None:
        with self._phase("checkpoint"):
            self._save_to(self._config.output, self.progress, self._config.checkpoint.keep)
        self._saved = self.progress.step

    def _save_to(self, output: pathlib.Path, progress: Progress, keep: int) -> None:
        record = self._record.as_json() if self._ranks.is_first else None
        checkpoints.save(self.policy, progress, self._tokenizer, output, keep, self._ranks, record)

    # -- what is seen ---------------------------------------------------------------------------

    def _report(
        self, figures: list[dict[str, float]], minis: list[MiniBatch], scored: list[list[Scored]], seconds: float
    ) -> None:
        counts = self.policy.route_counts()
        mine = old_and_rollout(minis, scored)
        gaps = self._ranks.gather(mine if self._ranks.piece == 0 else mine[:, :0])  # ranks of a replica have the same
        if not self._ranks.is_first:
            return
        assert self._rollout is not None
        values = step_values(self._config, self._rollout.episodes, figures, gaps, counts)
        values |= {
            "version": self.progress.version,
            **self._seconds,
            "seconds/step": seconds,
            "tokens_per_second": values["tokens"] / seconds,
        }
        self._writer.write(self.progress.step - 1, values)
        self._display.step(self.progress.step - 1, values)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._say(name)
        started = time.perf_counter()
        yield
        self._seconds[f"seconds/{name}"] = time.perf_counter() - started

    def _say(self, phase: str) -> None:
        self._display.phase(phase)
        self._ranks.watch.phase(phase)

    # -- when something goes wrong --------------------------------------------------------------

    def _from_first(self, make: Callable[[], list[list[MiniBatch]]]) -> list[MiniBatch]:
        """What `make` gives on the first rank, each rank its share; what it raises there ends every rank."""
        self._ranks.watch.phase("rollout")
        plans, failure = self._on_first(make)
        if failure is not None:
            raise failure
        return delivery.deliver(plans, self._ranks)

    def _on_first(self, work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What the first rank's work gave, or what it raised: every rank learns that it did, and none waits for it."""
        result, failure = None, None
        if self._ranks.is_first:
            try:
                result = work()
            except BaseException as error:
                failure = error
        if self._ranks.any(failure is not None):
            failure = self._agreed = failure or TrainError("the first rank failed; its message says why")
        return result, failure

    @contextlib.contextmanager
    def _saving_on_failure(self) -> Iterator[None]:
        """Nothing is lost: the state before the step is saved, and the step's rollouts where there are any."""
        try:
            yield
        except BaseException as error:
            if not self._is_everywhere(error):  # the other ranks wait elsewhere, and saving needs them all
                raise
            self._ranks.watch.agreed = True
            if isinstance(error, CheckpointError):  # to save again would fail again
                raise
            saved = self._saved_in_words(between_updates=isinstance(error, RouterReplayError))
            if isinstance(error, KeyboardInterrupt):
                raise TrainError(f"stopped at step {self.progress.step}; {saved}; go on with --resume") from error
            known = _not_an_exit(error)
            if isinstance(known, RouterReplayError):
                raise type(known)(f"step {self.progress.step}: {known}\n{saved}; go on with --resume") from error
            self._display.note(saved)
            raise

    def _is_everywhere(self, error: BaseException) -> bool:
        """Whether every rank has raised, so that they can do something together once more."""
        everywhere = isinstance(error, NotFiniteError | CheckpointError)
        return self._ranks.world == 1 or error is self._agreed or everywhere

    def _saved_in_words(self, between_updates: bool) -> str:
        try:
            return self._save_what_there_is(between_updates)
        except CheckpointError as error:
            return f"the state could not be saved: {error}"

    def _save_what_there_is(self, between_updates: bool) -> str:
        """`between_updates`: no optimizer step was cut in two, so that the weights are some that training had."""
        output, step = self._config.output, self.progress.step
        said = []
        touched = self.policy.updates != self.progress.updates or (self._updating and not between_updates)
        if touched and between_updates and self._saved != step:
            self.progress = dataclasses.replace(self.progress, updates=self.policy.updates)
            self._save()
            said.append(
                f"the weights with the updates of this step that were done are saved in {checkpoints.latest(output)}, "
                "and the step is played again from there"
            )
        elif touched:  # weights of half a step: kept apart, and not what --resume takes
            where = output / "failed" / f"step_{step:06}"
            half = dataclasses.replace(self.progress, updates=self.policy.updates)
            self._save_to(where, half, keep=1)
            last = checkpoints.latest(output)
            whole = f"the last whole checkpoint is {last}" if last else "there is no whole checkpoint: it starts anew"
            said.append(f"weights in the middle of the step are in {where}, {whole}")
        else:
            if self._saved != step:
                self._save()
            said.append(f"the state is saved in {checkpoints.latest(output)}")
        if self._ranks.is_first and self._rollout is not None and self._rollout.episodes:
            path = output / "failed" / f"step_{step:06}" / "rollouts.jsonl"
            said.append(save_episodes(self._rollout.episodes, path))
        return ", ".join(said)

    def _checkpoint_to_resume(self, resume: bool) -> pathlib.Path | None:
        output = self._config.output
        found = checkpoints.latest(output)
        if resume:
            return found
        if found is not None:
            raise ConfigError(f"{output} holds a run already ({found}): pass --resume to go on, or set another output")
        return None

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> SyncLoop:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)
