"""Run the asynchronous loop: the trainer takes finished groups of episodes while others are played.

A step is that of the synchronous loop (`sync.py`). What differs is on the first rank: `rollout/stream.py` plays
episodes in a thread of its own, the rollout of a step only waits for groups that are ready, and new weights reach the
engine while episodes are in progress.
"""

from __future__ import annotations

from router_replay.rl.loop.garbage import full_collections_between_steps
from router_replay.rl.loop.interrupts import Interrupts
from router_replay.rl.loop.rescue import saving_on_failure
from router_replay.rl.loop.run import Run
from router_replay.rl.loop.sync import step
from router_replay.rl.state.checkpoints import Progress


def async_loop(run: Run) -> Progress:
    """Run all remaining steps, stop the rollouts, write a last checkpoint, and return the progress."""
    with Interrupts(at_once=run.ranks.world == 1) as interrupts, saving_on_failure(run):
        if run.saved_step is None:  # --resume finds episodes by a checkpoint, so there is one from the start
            run.save()
        run.begin()
        with full_collections_between_steps() as collect:
            while run.progress.step < run.config.steps:
                step(run, interrupts)
                collect()
                run.stop_if_asked(interrupts.asked)
        if run.first is not None:
            run.first.stop()
        run.save()  # also after a step with a checkpoint: more episodes have finished since
    return run.progress
