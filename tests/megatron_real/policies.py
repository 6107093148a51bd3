"""One of several processes over gloo: a MegatronPolicy in each division makes two updates; results are saved.

    python -m tests.megatron_real.policies FOLDER RANK WORLD

A process runs the divisions for WORLD ranks, in both modes. FOLDER/model holds the model.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

from tests.megatron_real import cpu  # noqa: F401  (first: it lets megatron run on a CPU)

# isort: split
import numpy as np
import torch
import torch.distributed as dist

from router_replay import RouterSpec, Routes, Sample
from router_replay.measure import RouterFigures
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.policy import delivery
from router_replay.rl.policy.base import MOMENTS, BasePolicy
from router_replay.rl.policy.megatron.policy import MegatronPolicy
from router_replay.rl.processes.ranks import Ranks

PADDING = 40  # a token that stands in the sequences too, and whose embedding transformers does not train
LENGTHS = (9, 6, 7, 8, 5, 9, 4)
LR = 1e-3
MODES = ("r3", "r2")


@dataclasses.dataclass(frozen=True)
class Division:
    """One way to divide the model over `world` ranks: settings of the block [megatron]."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    recompute: str = "off"
    world: int = 2

    @property
    def settings(self) -> list[str]:
        return [
            f"megatron.tensor_parallel={self.tensor}",
            f"megatron.expert_parallel={self.expert}",
            f"megatron.pipeline_parallel={self.pipeline}",
            f"megatron.recompute={self.recompute}",
        ]


DIVISIONS = {
    "data": Division(),
    "expert": Division(expert=2),
    "tensor": Division(tensor=2),
    "tensor and expert": Division(tensor=2, expert=2, recompute="moe"),
    "pipeline": Division(pipeline=2),
    "pipeline, recompute": Division(pipeline=2, recompute="full"),
    "tensor, expert and pipeline": Division(tensor=2, expert=2, pipeline=2, world=4),
    "data, expert and pipeline": Division(expert=2, pipeline=2, world=4),
}


@dataclasses.dataclass
class Found:
    """What a policy computed: everything that must not depend on the division."""

    before: dict[str, torch.Tensor]  # on the first rank, as are the next two
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    figures: list[dict[str, float]]
    logprobs: list[dict[int, np.ndarray]]  # per pass, by the number of the sample; those of this rank's samples
    counts: Stats
    routers: RouterFigures


def config_of(folder: pathlib.Path, *settings: str) -> TrainConfig:
    """A run whose clip, temperature and warm-up are not 1: a factor that is lost shows."""
    own = ["trainer.backend=megatron", f"optimizer.lr={LR}", "rollout.temperature=0.8", "optimizer.weight_decay=0.1"]
    return load_config(None, [f"model.path={folder}", *own, *settings])


def samples(spec: RouterSpec) -> list[Sample]:
    """Sequences with random rows and old log-probs: a replay that does nothing shows."""
    made = []
    for number, length in enumerate(LENGTHS):
        rng = np.random.default_rng(number)
        ids = np.argsort(rng.random((length, len(spec.layers), spec.num_experts)), axis=-1)[..., : spec.top_k]
        routes = Routes(ids, spec, captured=np.arange(length) < length - 1)
        mask = np.arange(length) > 2
        tokens = rng.integers(2, 60, length)
        tokens[number % length] = PADDING
        made.append(Sample(tokens, -5 - rng.random(length), mask, routes, advantages=1.0 - number))
    return made


def train(policy: BasePolicy, ranks: Ranks, row_multiple: int = 1) -> Found:
    """Make an update with the first samples, and one with all; the third pass is the first again, which is clipped."""
    every = samples(policy.spec)
    parts = [every[:3], every]
    before = weights_of(policy)
    first, second = delivery.plan(parts, ranks, 24, "raise", row_multiple=row_multiple)[ranks.rank]
    figures, logprobs = [], []
    old = policy.score(first)
    for mini, scored in ((first, old), (second, None), (first, old)):
        known = scored or policy.score(mini)
        found = {}
        for micro, one in zip(mini.micro, known, strict=True):
            values, whole = one.old_logprobs.detach().numpy(), micro.whole
            found |= {int(n): values[whole.sample_ids == n] for n in np.unique(whole.sample_ids) if n >= 0}
        logprobs.append({number: values for number, values in found.items() if number < mini.sequences})
        figures.append(policy.update(mini, known))
    routers = policy.router_figures()
    assert routers is not None
    return Found(before, weights_of(policy), optimizer_of(policy), figures, logprobs, policy.route_counts(), routers)


def weights_of(policy: BasePolicy) -> dict[str, torch.Tensor]:
    """All weights on the first rank; nothing elsewhere."""
    shards = policy.shards()
    found = {name: shards.gather(name, "") for name in shards.like}
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


def optimizer_of(policy: BasePolicy) -> dict[str, Any]:
    """The optimizer's state on the first rank, as a checkpoint gives it back; nothing elsewhere."""
    shards = policy.shards()
    found = {name: {moment: shards.gather(name, moment) for moment in MOMENTS} for name in shards.steps}
    return {
        name: {"step": shards.steps[name], **{moment: tensor.clone() for moment, tensor in own.items()}}
        for name, own in found.items()
        if None not in own.values()
    }


def run(folder: pathlib.Path, rank: int, world: int, division: Division, mode: str) -> Found:
    config = config_of(folder, f"replay={mode}", *division.settings)
    ranks = Ranks(rank, world, 1, torch.device("cpu"), tensor=division.tensor, pipeline=division.pipeline)
    policy = MegatronPolicy(config, ranks, folder)
    return train(policy, ranks, division.tensor)


def main() -> None:
    folder, rank, world = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / f'policies{world}'}", rank=rank, world_size=world)
    found = {
        (name, mode): vars(run(folder / "model", rank, world, division, mode))
        for name, division in DIVISIONS.items()
        for mode in MODES
        if division.world == world
    }
    torch.save(found, folder / f"policy{rank}of{world}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
