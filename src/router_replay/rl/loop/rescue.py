"""Save the last good state, or what a failed step changed, and the step's rollouts; then say where they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from router_replay.errors import RouterReplayError, TrainError
from router_replay.rl.loop.run import Run
from router_replay.rl.policy.base import NotFiniteError
from router_replay.rl.rollout.episodes import save_episodes
from router_replay.rl.state import checkpoints
from router_replay.rl.state.checkpoints import CheckpointError


@contextlib.contextmanager
def saving_on_failure(run: Run) -> Iterator[None]:
    """Save the state if the block raises, and raise the error again with the saved paths in its message."""
    try:
        yield
    except BaseException as error:
        if not _is_everywhere(run, error):  # saving needs all ranks, and the others have not raised
            raise
        run.ranks.watch.agreed = True
        if isinstance(error, CheckpointError):  # a second save would fail again
            raise
        saved = _saved_in_words(run, between_updates=isinstance(error, RouterReplayError))
        if isinstance(error, KeyboardInterrupt):
            raise TrainError(f"stopped at step {run.progress.step}; {saved}; continue with --resume") from error
        known = not_an_exit(error)
        if isinstance(known, RouterReplayError):
            raise type(known)(f"step {run.progress.step}: {known}\n{saved}; continue with --resume") from error
        run.display.note(saved)
        raise


def not_an_exit(error: BaseException) -> BaseException:
    """Return `error`, or a TrainError in place of SystemExit.

    sys.exit inside a run would end it with an arbitrary status, possibly 0, and without a message.
    """
    if isinstance(error, SystemExit):
        return TrainError(f"code of this run called sys.exit({error.code!r}); raise an exception instead to end a run")
    return error


def _is_everywhere(run: Run, error: BaseException) -> bool:
    """Return whether every rank has raised, so that they can run collectives once more."""
    everywhere = isinstance(error, NotFiniteError | CheckpointError)
    return run.ranks.world == 1 or error is run.agreed or everywhere


def _saved_in_words(run: Run, between_updates: bool) -> str:
    try:
        return _save_what_there_is(run, between_updates)
    except CheckpointError as error:
        return f"the state could not be saved: {error}"


def _save_what_there_is(run: Run, between_updates: bool) -> str:
    """Save the state and return a message that says where.

    `between_updates` is True if no optimizer step was interrupted, so that the weights are a state that training had.
    """
    output, step = run.config.output, run.progress.step
    said = []
    touched = run.policy.updates != run.progress.updates or (run.updating and not between_updates)
    # Episodes of a finished update must not be trained again, which the asynchronous loop promises.
    repeats = run.config.loop == "sync"
    if touched and between_updates and repeats and run.saved_step != step:
        run.progress = dataclasses.replace(run.progress, updates=run.policy.updates)
        run.save()
        said.append(
            f"the weights with the finished updates of this step are saved in {checkpoints.latest(output)}, "
            "and --resume runs the step again from there"
        )
    elif touched:  # weights of half a step: stored separately, and not used by --resume
        where = output / "failed" / f"step_{step:06}"
        run.save_to(where, dataclasses.replace(run.progress, updates=run.policy.updates), keep=1)
        last = checkpoints.latest(output)
        whole = f"the last complete checkpoint is {last}" if last else "there is no checkpoint, so --resume starts over"
        said.append(f"the weights in the middle of the step are in {where} and are not resumed from, {whole}")
    else:
        if run.saved_step != step:
            run.save()
        said.append(f"the state is saved in {checkpoints.latest(output)}")
    if run.first is not None and run.first.episodes:
        path = output / "failed" / f"step_{step:06}" / "rollouts.jsonl"
        said.append(save_episodes(run.first.episodes, path))
    return ", ".join(said)
