"""Measure what replay costs a training step: score + update with R2 and R3 against off, interleaved in one run.

    python -m bench.train                              # the tiny model, on a GPU if there is one
    python -m bench.train --model models/gpu --dtype bfloat16

The embedded engine samples one set of episodes with its routes. Each round then runs one whole step of every mode on
it, in turn, each with its own policy. The figure is the median over rounds of mode / off within the round. The program
also follows the rows of R3 from the samples to the routers and prints where they were copied.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.replay import time_rounds
from router_replay.batch import Sample, pack
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.replay.state import Column, Plan
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.environments import make_task
from router_replay.rl.policy import delivery
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.models import load_tokenizer, model_folder
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes import ranks
from router_replay.rl.rollout import Rollout
from router_replay.rl.rollout.episodes import samples_of

LIMITS = {"cuda": 1.03, "cpu": 1.05}  # off against off differs by up to 3 % on two noisy cores
MODES = ("off", "off again", "r2", "r3")


def read_options(description: str | None) -> argparse.Namespace:
    """Return the command-line options of the workload, whose --help shows `description`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="slots of a packed pass")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def settings(arguments: argparse.Namespace, mode: str, output: str) -> TrainConfig:
    return load_config(
        None,
        [
            f"replay={mode.partition(' ')[0]}", f'model.path="{arguments.model}"', f"model.dtype={arguments.dtype}",
            f"output={output}", "engine.kind=embedded", "engine.max_length=128", f"rollout.prompts={arguments.prompts}",
            "rollout.group=8", "rollout.max_tokens=12", f"environment.digits={arguments.digits}",
            f"trainer.max_tokens={arguments.tokens}", "optimizer.lr=1e-6",
        ],
    )  # fmt: skip


def sampled(config: TrainConfig, here: ranks.Ranks) -> list[Sample]:
    folder = model_folder(config.model.path)
    task = make_task(config.environment, load_tokenizer(folder), config.seed)
    with EmbeddedEngine(folder, max_length=config.engine.max_length, device_map=str(here.device)) as engine:
        rollout = Rollout(engine, task, range(config.rollout.prompts), config.rollout, max_length=128, seed=(0, 0))
        return samples_of(rollout.run(), config, with_routes=True)[0]


def planned(samples: list[Sample], config: TrainConfig, here: ranks.Ranks) -> list[MiniBatch]:
    parts = delivery.split(samples, range(len(samples)), config.optimizer.mini_batches, (0, 0))
    return delivery.plan(parts, here, config.trainer.max_tokens, "raise")[0]


def row_copies(samples: list[Sample], policy: Policy, max_tokens: int) -> list[str]:
    """Return the places between a sample and the routers of score and update where its rows are copied."""
    batch = pack(samples, max_tokens)
    whole = next(batch.bins())
    [local] = whole.split(1)
    read = _reads_of_the_routers(policy, MiniBatch((local,), int(whole.label_mask.sum()), 1))
    places: dict[str, Any] = {"sample": samples[int(whole.sample_ids[0])], "pack": batch, "bins": whole, "split": local}
    rows = [(name, holder.routes.ids) for name, holder in places.items() if holder.routes is not None]
    copied = [name for (_, was), (name, now) in itertools.pairwise(rows) if not np.shares_memory(was, now)]
    copied += ["tensor"] if read[0].device.type == "cpu" else ["tensor", "device"]
    # The update reads what the scoring pass used, which has experts for the missing rows too.
    copies = len({one.data_ptr() for one in read}) - 1
    return copied + ["scoring pass"] * min(copies, 1) + ["again"] * max(copies - 1, 0)


def _reads_of_the_routers(policy: Policy, mini: MiniBatch) -> list[torch.Tensor]:
    """Return the row tensors that the routers read from in one step."""
    read: list[torch.Tensor] = []
    column = Plan.column

    def reading(plan: Plan, index: Column) -> torch.Tensor:
        read.append(plan.ids_TLK)
        return column(plan, index)

    with unittest.mock.patch.object(Plan, "column", reading):
        policy.update(mini, policy.score(mini))
    return read


def main() -> int:
    arguments = read_options(__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as output:
        configs = {mode: settings(arguments, mode, output) for mode in MODES}
    here = ranks.join(configs["off"])
    samples = sampled(configs["off"], here)
    minis = planned(samples, configs["off"], here)
    policies = {mode: Policy(config, here, model_folder(config.model.path)) for mode, config in configs.items()}

    def step(policy: Policy) -> None:
        scored = [policy.score(mini) for mini in minis]
        for mini, old in zip(minis, scored, strict=True):
            policy.update(mini, old)
        policy.route_counts()

    wait = torch.cuda.synchronize if here.device.type == "cuda" else lambda: None
    steps: dict[str, Callable[[], None]] = {mode: functools.partial(step, policy) for mode, policy in policies.items()}
    seconds = time_rounds(steps, arguments.rounds, wait)
    where = torch.cuda.get_device_name() if here.device.type == "cuda" else "CPU, one thread"
    slots = sum(len(micro.whole) for mini in minis for micro in mini.micro)
    size = sum(parameter.numel() for parameter in policies["off"].model.parameters()) / 1e6
    print(f"\nScore + update of {slots} tokens, {size:.0f}M parameters, {arguments.dtype}, {where}\n")
    print("| mode | ms, median | against off |\n| --- | ---: | ---: |")
    ratios = {}
    for mode, taken in seconds.items():
        ratios[mode] = statistics.median(a / b for a, b in zip(taken, seconds["off"], strict=True))
        print(f"| {mode} | {statistics.median(taken) * 1e3:.1f} | {ratios[mode]:.4f}x |")
    copies = row_copies(samples, policies["r3"], arguments.tokens)
    print(f"\nrows are copied {len(copies)} times between a sample and the routers: {', '.join(copies)}")
    limit = LIMITS[here.device.type]
    missed = ratios["r3"] > limit
    print(f"\na step with R3 costs {ratios['r3']:.4f}x (limit {limit}x): {'MISSED' if missed else 'ok'}")
    ranks.leave()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
