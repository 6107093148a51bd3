"""Run one process of a training run, from joining the others to leaving them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import torch

from router_replay.rl.config import TrainConfig
from router_replay.rl.config.checks import check_config
from router_replay.rl.loop.asynchronous import async_loop
from router_replay.rl.loop.rescue import not_an_exit
from router_replay.rl.loop.run import Run
from router_replay.rl.loop.sync import sync_loop
from router_replay.rl.processes import ranks
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.state.checkpoints import Progress
from router_replay.rl.state.run_folder import hold


def train(config: TrainConfig, resume: bool = False) -> Progress:
    """Train to the end, or raise after saving the state. Call it once per process; torchrun starts several.

    `resume` continues from the newest checkpoint in `config.output`, with any number of processes.
    """
    warnings = check_config(config, ranks.world_size())
    here = ranks.join(config)
    _leave_the_engine_a_core(config, here)
    failed = True
    try:
        progress = _run(config, here, resume, warnings)
        failed = False
        return progress
    except BaseException as error:
        raise here.watch.failed(not_an_exit(error)) from error.__cause__
    finally:
        ranks.leave(here, failed)


def _run(config: TrainConfig, here: Ranks, resume: bool, warnings: Sequence[str]) -> Progress:
    with contextlib.ExitStack() as held:
        note = held.enter_context(hold(config.output)) if here.is_first else None
        with Run(config, here, resume, [*warnings, *filter(None, [note])]) as run:
            return async_loop(run) if config.loop == "async" else sync_loop(run)


def _leave_the_engine_a_core(config: TrainConfig, here: Ranks) -> None:
    """Leave the engine a CPU core: threads that wait for each other while vLLM uses their core slow a step tenfold."""
    inside = config.cluster.kind == "processes" and any(one.kind == "vllm" for one in config.all_engines.values())
    if here.device.type == "cpu" and inside and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - 1)))
