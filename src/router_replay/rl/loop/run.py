"""Hold one rank's state of a run from start to end, and the operations that every loop uses.

A loop (`sync.py`, `asynchronous.py`) is the algorithm; everything it needs is here: the policy, the first rank's work,
the progress, and the checkpoints.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.log.display import ASYNC_COLUMNS, COLUMNS, Display, Quiet
from router_replay.rl.loop.first_rank import FirstRank
from router_replay.rl.loop.phases import Phases
from router_replay.rl.policy import delivery
from router_replay.rl.policy.backends import make_policy
from router_replay.rl.policy.base import Scored, old_and_rollout
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.models import LoadError, load_tokenizer, model_folder
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.state import checkpoints
from router_replay.rl.state.checkpoints import Progress
from router_replay.rl.weights.lending import lending

T = TypeVar("T")


class Run:
    """Hold one rank's side of a run. `first` does the first rank's work and is None on the other ranks.

    `updating` is True while the weights may be those of half a step; `agreed` is the failure that every rank knows of.
    """

    def __init__(self, config: TrainConfig, here: Ranks, resume: bool, warnings: Sequence[str] = ()) -> None:
        self.config, self.ranks = config, here
        self.updating = False
        self.agreed: BaseException | None = None
        self.first: FirstRank | None = None
        self._post = _post(config)
        self._closing = contextlib.ExitStack()
        checkpoint = self._checkpoint_to_resume(resume)
        self.progress = Progress() if checkpoint is None else checkpoints.read_progress(checkpoint)
        self.saved_step = self.progress.step if checkpoint is not None else None
        title = f"{config.output.name}: replay {config.replay}"
        columns = ASYNC_COLUMNS if config.loop == "async" else COLUMNS
        self.display: Display | Quiet = Quiet()
        if here.is_first:
            self.display = Display(config.steps, title, done=self.progress.step, columns=columns)
        self.phases = Phases(self.display, here.watch)
        self._closing.enter_context(self.display)
        here.watch.give_up = self._closing.close
        with self._end_on_error():
            for warning in warnings:
                self.display.note(warning)
            self._load(checkpoint)
            with lending(self.policy, here) as lent:
                if self.first is not None and lent is not None:
                    self.phases.say("starting the engine")
                    on_turn = self.ranks.watch.beat
                    self.first.start(self.policy, lent.weights, self.progress, self.display, self._closing, on_turn)

    def _load(self, checkpoint: pathlib.Path | None) -> None:
        """Load the problems, the settings, the model and the checkpoint.

        The first rank reads the problems and compares the settings before it loads the model, because these are the
        most frequent errors.
        """
        self.phases.say("loading the model")
        folder = checkpoint or model_folder(self.config.model.path)
        try:
            self._tokenizer = load_tokenizer(folder)
            if self.ranks.is_first:
                note = self.display.note
                self.first = FirstRank(self.config, self._tokenizer, checkpoint, self.progress, note)
            self.policy = make_policy(self.config, self.ranks, folder)
            self._closing.callback(self.policy.close)
            self.display.fact(f"attention: {self.policy.attention}")
        except LoadError as error:
            raise (error if checkpoint is None else checkpoints.damaged(checkpoint, error.file, error)) from error
        if checkpoint is not None:
            checkpoints.restore(self.policy, checkpoint)

    # -- what a step is made of -------------------------------------------------------------------

    def rollout(self) -> list[MiniBatch]:
        """Play this step's problems on the first rank; every rank gets its mini-batches."""
        self.ranks.watch.phase("rollout")

        def play(first: FirstRank) -> list[list[MiniBatch]]:
            return first.plan(first.play(self.progress, self.ranks, self.phases), self.progress, self.ranks)

        plans, failure = self.on_first(play)
        if failure is not None:
            raise failure
        return delivery.deliver(plans, self.ranks, self._post)

    def step_is_done(self) -> None:
        """Count the step after all its updates."""
        self.progress = Progress(
            step=self.progress.step + 1,
            version=self.progress.version + 1,
            problem=self.progress.problem + self.config.rollout.prompts,
            updates=self.policy.updates,
        )
        self.updating = False

    def push(self) -> BaseException | None:
        """Give the engine the new weights. A failure is returned, because the step's metrics must still be written."""
        failure = None
        with lending(self.policy, self.ranks) as lent:
            if self.first is not None and lent is not None:
                weights = lent.weights
                _, failure = self._try(lambda first: first.push(weights, self.progress.version))
        return self._agree(failure)

    def begin(self) -> None:
        """Evaluate the version that the run starts with, if that is due."""
        if self.progress.step < self.config.steps and (failure := self.evaluate()) is not None:
            raise failure

    def evaluate(self) -> BaseException | None:
        """Evaluate the current version if that is due. A failure is returned, as by `push`."""
        every, last = self.config.evaluation.every, self.progress.step >= self.config.steps
        if not every or (self.progress.version % every and not last):
            return None
        with self.phases.phase("evaluation"):
            return self.on_first(lambda first: first.evaluate(self.progress))[1]

    def report(self, figures: list[dict[str, float]], minis: list[MiniBatch], scored: list[list[Scored]]) -> None:
        """Gather the results of all ranks; the first rank writes them."""
        seconds = self.phases.end_step()
        routes, routers = self.policy.route_counts(), self.policy.router_figures()
        mine = old_and_rollout(minis, scored)
        gaps = self.ranks.gather(mine if self.ranks.piece == 0 else mine[:, :0])  # equal on all ranks of a replica
        if self.first is not None:
            self.first.report(self.progress, figures, gaps, routes, routers, seconds, self.ranks)

    def save(self) -> None:
        """Write a checkpoint of the current state."""
        with self.phases.phase("checkpoint"):
            progress = self.progress if self.first is None else self.first.for_checkpoint(self.progress)
            self.save_to(self.config.output, progress, self.config.checkpoint.keep)
            if self.first is not None:
                self.first.checkpoint_is_written()
        self.saved_step = self.progress.step

    def save_to(self, output: pathlib.Path, progress: Progress, keep: int) -> None:
        """Write a checkpoint below `output`, and remove the oldest ones beyond `keep`. All ranks must call it."""
        record = None if self.first is None else self.first.record.as_json()
        checkpoints.save(self.policy, progress, self._tokenizer, output, keep, self.ranks, record)

    # -- ranks that must agree --------------------------------------------------------------------

    def on_first(self, work: Callable[[FirstRank], T]) -> tuple[T | None, BaseException | None]:
        """Run `work` on the first rank; return its result and its error.

        Every rank learns of a failure, so none waits.
        """
        result, failure = self._try(work)
        return result, self._agree(failure)

    def _try(self, work: Callable[[FirstRank], T]) -> tuple[T | None, BaseException | None]:
        """Run `work` on the first rank; return its result and its error, of which the others do not know yet."""
        if self.first is None:
            return None, None
        try:
            return work(self.first), None
        except BaseException as error:
            return None, error

    def _agree(self, failure: BaseException | None) -> BaseException | None:
        """Return the first rank's `failure` on every rank, or None if there is none. All ranks must call it."""
        if self.ranks.any(failure is not None):
            failure = self.agreed = self._told_by_first(failure)
        return failure

    def _told_by_first(self, failure: BaseException | None) -> BaseException:
        """Return the first rank's failure on every rank.

        torchrun ends all ranks when one has left, so each must report the reason.
        """
        text = f"the first rank failed: {type(failure).__name__}: {failure}".encode()
        told = self.ranks.scatter([text] * self.ranks.world if self.ranks.is_first else None)
        return failure or TrainError(told.decode())

    def stop_if_asked(self, asked: bool) -> None:
        """Raise KeyboardInterrupt on all ranks if one of them was asked to stop."""
        if self.ranks.any(asked):
            self.agreed = KeyboardInterrupt()
            raise self.agreed

    # -- start and end ----------------------------------------------------------------------------

    def _checkpoint_to_resume(self, resume: bool) -> pathlib.Path | None:
        output = self.config.output
        found = checkpoints.latest(output)
        if resume:
            return found
        if found is not None:
            raise ConfigError(
                f"{output} already holds a run ({found}): pass --resume to continue it, or set another output"
            )
        return None

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)


def _post(config: TrainConfig) -> delivery.Post | None:
    """Return what brings references to routes from the first rank to the others; None if the rows travel themselves."""
    if config.cluster.kind != "ray":
        return None
    from router_replay.rl.cluster.routes import RayPost

    return RayPost()
