"""One of several processes over gloo: each way to divide the model runs the same micro-batches; results are saved.

    python -m tests.megatron_real.ranks FOLDER RANK WORLD

A process runs the divisions for WORLD ranks.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import weakref
from typing import Any

from tests.megatron_real import tiny

# isort: split
import numpy as np
import torch
import torch.distributed as dist

from router_replay import RouterReplay, Routes
from router_replay.errors import ReplayError
from router_replay.replay.megatron import MegatronReplay, install
from router_replay.replay.megatron.site import MicroBatchPlan
from tests.makers import random_routes
from tests.megatron_real import native_api

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MICRO_BATCHES, SEQUENCES, TOKENS = 4, 2, 16


@dataclasses.dataclass(frozen=True)
class Division:
    """One way to divide a model over `world` ranks: the sizes of its groups, settings, and the dense layers."""

    sizes: dict[str, int]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    dense: tuple[int, ...] = (0,)
    data_parallel: int = 1
    world: int = 2


PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
EXPERT_TENSOR = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
DIVISIONS = {
    "data": Division({}, data_parallel=2),
    "expert": Division({"expert_model_parallel_size": 2}, data_parallel=2),
    "expert, recompute": Division({"expert_model_parallel_size": 2}, FULL, data_parallel=2),
    "tensor": Division(TENSOR),
    "tensor, recompute": Division(TENSOR, FULL),
    "expert tensor": Division(EXPERT_TENSOR),
    "expert tensor, recompute": Division(EXPERT_TENSOR, FULL),
    "pipeline": Division(PIPELINE),
    "pipeline, recompute": Division(PIPELINE, FULL),
    "pipeline, no router on the first stage": Division(PIPELINE, dense=(0, 1)),
    "virtual pipeline": Division(VIRTUAL),
    "virtual pipeline, recompute": Division(VIRTUAL, FULL),
    "tensor and pipeline": Division(TENSOR | PIPELINE, world=4),
    "tensor and pipeline, recompute": Division(TENSOR | PIPELINE, FULL, world=4),
}


def hf_of(division: Division) -> Any:
    return tiny.hf_model(mlp_only_layers=list(division.dense))


def forced(spec: Any, missing: bool = False) -> list[Routes]:
    """Random routes for all micro-batches; with `missing`, three rows of each are not captured."""
    captured = ~np.isin(np.arange(TOKENS), (0, 5, 15)) if missing else None
    return [Routes(random_routes(TOKENS, spec, n).ids, spec, captured=captured) for n in range(MICRO_BATCHES)]


def own(entries: list[Any], division: Division, rank: int) -> list[Any]:
    """The micro-batches of this rank's data parallel part."""
    part = len(entries) // division.data_parallel
    return entries[rank * part : (rank + 1) * part] if division.data_parallel > 1 else entries


def run(division: Division, rank: int) -> dict[str, Any]:
    tiny.start(rank, division.world, **division.sizes)
    chunks = tiny.megatron_model(hf_of(division), **division.settings)
    batches = own(tiny.tokens(MICRO_BATCHES, SEQUENCES), division, rank)
    shape = {"micro_batch_size": SEQUENCES, "seq_length": tiny.LENGTH, "num_microbatches": len(batches)}
    live = tiny.train_step(chunks, batches)
    replayer = MegatronReplay(chunks, agreement=True)
    spec = replayer.spec
    found: dict[str, Any] = {"layout": replayer.layout, "spec": spec, "live": live}
    with replayer.record() as recording:
        found["recorded step"] = tiny.train_step(chunks, batches)
    found["recorded"] = recording.gather()
    with replayer.replay(recording, **shape, forward_only=False):
        found["own step"] = tiny.train_step(chunks, batches)
    found["own stats"] = replayer.stats_of_all_ranks()

    for name, missing in (("forced", False), ("missing", True)):
        routes = own(forced(spec, missing), division, rank)
        held: list[int] = []
        alive = watch_plans()
        before = replayer.stats_of_all_ranks()
        with replayer.replay(routes, **shape, forward_only=False), replayer.record() as recording:
            step = tiny.train_step(chunks, batches, during=lambda number, a=alive, h=held: h.append(len(a)))
        found[f"{name} step"], found[f"{name} used"] = step, recording.gather()
        found[f"{name} held"], found[f"{name} left"] = max(held), len(alive)
        found[f"{name} stats"] = replayer.stats_of_all_ranks().since(before)
    of_hf = hf_gradients(division)
    found["gradients of transformers"] = [
        {name: tiny.from_hf(chunk, name, of_hf) for name in gradients}
        for chunk, gradients in zip(chunks, found["missing step"].gradients, strict=True)
    ]

    routes = own(forced(spec), division, rank)
    shares = [replayer.layout.share(one, SEQUENCES) for one in routes]
    found["bytes"] = sum(share.nbytes for share in shares)
    with replayer.replay(shares, **shape):
        found["share step"] = tiny.train_step(chunks, batches)
    with replayer.replay(routes, **shape, forward_only=True):
        tiny.train_step(chunks, batches, forward_only=True)
    found["live again"] = tiny.train_step(chunks, batches)
    found["refused"] = refusals(replayer, routes, shape)
    if "pipeline_model_parallel_size" in division.sizes and replayer.layout.parts == 1:
        found |= native_calls(division, batches, routes)
    return found


def native_calls(division: Division, batches: list[Any], routes: list[Routes]) -> dict[str, Any]:
    """The same step by Megatron's own RouterReplay: right, with a forgotten switch, and that under install()."""
    chunks = tiny.megatron_model(hf_of(division), **division.settings, moe_enable_routing_replay=True)
    found = {
        "native step": native_api.replay_step(chunks, batches, routes),
        "forgotten switch": native_api.replay_step(chunks, batches, routes, switch=False),
    }
    with install(chunks):
        found["forgotten switch, installed"] = native_api.replay_step(chunks, batches, routes, switch=False)
    native_api.RouterReplay.clear_global_router_replay_instances()
    return found


def hf_gradients(division: Division) -> dict[str, Any]:
    """The gradients of transformers for all micro-batches under the same routes with missing rows, in one process."""
    hf = hf_of(division)
    replayer = RouterReplay(hf)
    batches = tiny.tokens(MICRO_BATCHES, SEQUENCES)
    for batch, routes in zip(batches, forced(replayer.spec, missing=True), strict=True):
        with replayer.replay(routes):
            (tiny.hf_losses(hf, batch).sum() / (MICRO_BATCHES // division.data_parallel)).backward()
    return {name: parameter.grad for name, parameter in hf.named_parameters()}


def watch_plans() -> weakref.WeakSet[MicroBatchPlan]:
    """The plans whose rows are on the device."""
    alive: weakref.WeakSet[MicroBatchPlan] = weakref.WeakSet()
    made = MicroBatchPlan.of.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plan = made(cls, *args, **kwargs)
        alive.add(plan)
        return plan

    MicroBatchPlan.of = classmethod(watched)  # type: ignore[assignment]
    return alive


def refusals(replayer: MegatronReplay, routes: list[Routes], shape: dict[str, Any]) -> list[str]:
    """What every rank says to bad input before the schedule: nobody waits for another."""
    cut = [one[: TOKENS - 2] for one in routes]
    other = [Routes(one.ids, dataclasses.replace(one.spec, num_experts=9)) for one in routes]
    said = []
    for bad in (routes[1:], cut, other, None):
        try:
            with replayer.replay(bad, **shape):
                said.append("nothing")
        except ReplayError as error:
            said.append(str(error))
    return said


def main() -> None:
    folder, rank, world = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    tiny.start(rank, world, str(folder / f"store{world}"))
    found = {name: run(division, rank) for name, division in DIVISIONS.items() if division.world == world}
    torch.save(found, folder / f"rank{rank}of{world}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
