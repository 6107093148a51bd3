"""Run the synchronous loop: rollout, reward, advantage, old log-probs, mini-batch updates, new engine weights.

Every rank runs it. The first rank also has the engine, the environments and the files (`first_rank.py`). `run.py`
defines what each call does, and `rescue.py` what happens when one of them fails.
"""

from __future__ import annotations

from router_replay.rl.loop.interrupts import Interrupts
from router_replay.rl.loop.rescue import saving_on_failure
from router_replay.rl.loop.run import Run
from router_replay.rl.state.checkpoints import Progress


def sync_loop(run: Run) -> Progress:
    """Run all remaining steps, write a last checkpoint, and return the progress."""
    with Interrupts(at_once=run.ranks.world == 1) as interrupts, saving_on_failure(run):
        run.begin()
        while run.progress.step < run.config.steps:
            step(run, interrupts)
            run.stop_if_asked(interrupts.asked)
        if run.saved_step != run.progress.step:
            run.save()
    return run.progress


def step(run: Run, interrupts: Interrupts) -> None:
    """Run one step. Its batches, and their tensors on the device, are freed when it returns."""
    policy = run.policy
    run.phases.begin_step()
    minis = run.rollout()
    with run.phases.phase("score"):
        scored = [policy.score(mini) for mini in minis]
    with interrupts.held():
        run.updating = True
        with run.phases.phase("update"):
            figures = [policy.update(mini, old) for mini, old in zip(minis, scored, strict=True)]
        run.step_is_done()
        with run.phases.phase("sync"):
            failure = run.push()
        if failure is None:
            failure = run.evaluate()
        # Written before the checkpoint, so that a step that will not run again has its metrics even if the run is
        # killed.
        run.report(figures, minis, scored)
        if failure is not None:
            raise failure
        every = run.config.checkpoint.every
        if every and run.progress.step % every == 0:
            run.save()
