"""When a step fails: save the state before it, or what it changed, and the step's rollouts; then say where they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from router_replay.errors import RouterReplayError, TrainError
from router_replay.rl.loop.run import Run
from router_replay.rl.policy.policy import NotFiniteError
from router_replay.rl.rollout.episodes import save_episodes
from router_replay.rl.state import checkpoints
from router_replay.rl.state.checkpoints import CheckpointError


@contextlib.contextmanager
def saving_on_failure(run: Run) -> Iterator[None]:
    """Whatever the block raises is raised again, with what was saved in its message."""
    try:
        yield
    except BaseException as error:
        if not _is_everywhere(run, error):  # the other ranks wait elsewhere, and saving needs them all
            raise
        run.ranks.watch.agreed = True
        if isinstance(error, CheckpointError):  # to save again would fail again
            raise
        saved = _saved_in_words(run, between_updates=isinstance(error, RouterReplayError))
        if isinstance(error, KeyboardInterrupt):
            raise TrainError(f"stopped at step {run.progress.step}; {saved}; go on with --resume") from error
        known = not_an_exit(error)
        if isinstance(known, RouterReplayError):
            raise type(known)(f"step {run.progress.step}: {known}\n{saved}; go on with --resume") from error
        run.display.note(saved)
        raise


def not_an_exit(error: BaseException) -> BaseException:
    """sys.exit inside a run would end it with a status of the caller's choice, 0 among them, and without a message."""
    if isinstance(error, SystemExit):
        return TrainError(f"something in this run called sys.exit({error.code!r}); a run ends by raising")
    return error


def _is_everywhere(run: Run, error: BaseException) -> bool:
    """Whether every rank has raised, so that they can do something together once more."""
    everywhere = isinstance(error, NotFiniteError | CheckpointError)
    return run.ranks.world == 1 or error is run.agreed or everywhere


def _saved_in_words(run: Run, between_updates: bool) -> str:
    try:
        return _save_what_there_is(run, between_updates)
    except CheckpointError as error:
        return f"the state could not be saved: {error}"


def _save_what_there_is(run: Run, between_updates: bool) -> str:
    """`between_updates`: no optimizer step was cut in two, so that the weights are some that training had."""
    output, step = run.config.output, run.progress.step
    said = []
    touched = run.policy.updates != run.progress.updates or (run.updating and not between_updates)
    if touched and between_updates and run.saved_step != step:
        run.progress = dataclasses.replace(run.progress, updates=run.policy.updates)
        run.save()
        said.append(
            f"the weights with the updates of this step that were done are saved in {checkpoints.latest(output)}, "
            "and the step is played again from there"
        )
    elif touched:  # weights of half a step: kept apart, and not what --resume takes
        where = output / "failed" / f"step_{step:06}"
        run.save_to(where, dataclasses.replace(run.progress, updates=run.policy.updates), keep=1)
        last = checkpoints.latest(output)
        whole = f"the last whole checkpoint is {last}" if last else "there is no whole checkpoint: it starts anew"
        said.append(f"weights in the middle of the step are in {where}, {whole}")
    else:
        if run.saved_step != step:
            run.save()
        said.append(f"the state is saved in {checkpoints.latest(output)}")
    if run.first is not None and run.first.episodes:
        path = output / "failed" / f"step_{step:06}" / "rollouts.jsonl"
        said.append(save_episodes(run.first.episodes, path))
    return ", ".join(said)
