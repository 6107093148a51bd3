"""One of two processes over gloo: each kind of parallelism runs the same forced batch, and the results are saved.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python parallel_worker.py FOLDER

FOLDER holds the tiny model. The routes are random, not the model's own: a replay that does nothing shows.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from router_replay import RouterReplay, RouterSpec, Routes, Sample, logprobs, pack
from router_replay.batch import Batch
from router_replay.forward import Ulysses

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 2), num_layers=3)
LENGTHS = (10, 6, 8, 4)


def make_batch(samples: tuple[int, ...] = (0, 1, 2, 3)) -> Batch:
    made = []
    for number in samples:
        rng = np.random.default_rng(number)
        length = LENGTHS[number]
        ids = np.argsort(rng.random((length, 2, 8)), axis=-1)[..., :2]
        captured = np.arange(length) != length - 1  # the last row is never there
        mask = np.arange(length) > 2
        tokens = rng.integers(1, 64, length)
        made.append(Sample(tokens, np.zeros(length), mask, Routes(ids, SPEC, captured=captured)))
    return pack(made, max_tokens=64, pad_to_multiple_of=4)


TOTAL = sum(int((make_batch((n,))).label_mask.sum()) for n in range(4))


def run(
    model: Any,
    batch: Batch,
    whole: Batch | None = None,
    ulysses: Ulysses | None = None,
    replayer: RouterReplay | None = None,
) -> dict[str, Any]:
    """Loss and backward under forced routes; what the routers used, by their own record."""
    replayer = replayer or RouterReplay(model, agreement=True)
    arguments = ulysses.arguments(whole or batch) if ulysses else {}
    with replayer.replay(batch), replayer.record() as recording:
        out = logprobs(model, batch, **arguments)
        if ulysses:
            ulysses.check(arguments)
        loss = -(out * torch.from_numpy(batch.label_mask)).sum() / TOTAL
    loss.backward()
    used, asked = recording.routes, batch.routes
    captured = asked.captured
    exact = np.array_equal(used.ids[captured], asked.ids[captured])
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in found.items()}
    stats = replayer.stats
    return {"loss": loss.detach(), "grads": grads, "exact": exact, "rows": stats.rows_replayed, "live": stats.rows_live}


def load(folder: str, config: DistributedConfig | None = None) -> Any:
    extra = {"distributed_config": config} if config else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **extra)


def summed(result: dict[str, Any]) -> dict[str, Any]:
    """Each rank had a part of the tokens: losses and gradients add up."""
    dist.all_reduce(result["loss"])
    for gradient in result["grads"].values():
        dist.all_reduce(gradient)
    return result


def averaged(result: dict[str, Any]) -> dict[str, Any]:
    """As above, and the wrapper took the mean of the gradients, whose names it changed."""
    dist.all_reduce(result["loss"])
    plain = {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): name for name in result["grads"]}
    result["grads"] = {name: result["grads"][wrapped] * 2 for name, wrapped in plain.items()}
    return result


def part() -> Batch:
    return make_batch(((0, 1), (2, 3))[dist.get_rank()])


def checkpointed(folder: str) -> Any:
    """Layers are recomputed in backward, after the replay block was closed."""
    model = load(folder).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def fsdp2(model: Any) -> dict[str, Any]:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return averaged(run(model, part()))


def ddp(model: Any, **options: Any) -> dict[str, Any]:
    return averaged(run(nn.parallel.DistributedDataParallel(model, **options), part()))


def fsdp1(model: Any, *, use_orig_params: bool, layers: bool = True, wrapped_later: bool = False) -> dict[str, Any]:
    """Parameters are flat outside a pass. An optimizer step shows their gradients: the weights move by them."""
    replayer = RouterReplay(model, agreement=True) if wrapped_later else None
    policy = ModuleWrapPolicy({Qwen3MoeDecoderLayer}) if layers else None
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=cpu)

    def weights() -> dict[str, Any]:
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return {name: parameter.detach().clone() for name, parameter in wrapped.named_parameters()}

    before, optimizer = weights(), torch.optim.SGD(wrapped.parameters(), lr=1.0)
    result = run(wrapped, part(), replayer=replayer)
    optimizer.step()
    result["grads"] = {name: before[name] - after for name, after in weights().items()}
    return averaged(result)


def tensor_parallel(folder: str) -> dict[str, Any]:
    return run(load(folder, DistributedConfig(tp_size=2)), make_batch())


def expert_parallel_masking(folder: str) -> dict[str, Any]:
    plan = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
    return run(load(folder, DistributedConfig(tp_size=2, ep_size=2, ep_plan=plan)), make_batch())


def expert_parallel_dispatch(folder: str) -> dict[str, Any]:
    """Tokens travel to the ranks of their experts by all-to-all: transformers' own plan for this family."""
    return run(load(folder, DistributedConfig(tp_size=2, ep_size=2)), make_batch())


def ulysses(folder: str) -> dict[str, Any]:
    model, whole = load(folder), make_batch()
    return summed(run(model, whole.shard(dist.get_rank(), 2), whole, Ulysses(model)))


# Each parameter of these is whole, or can be made whole: all gradients are compared, not the routers' alone.
EVERY_GRADIENT: dict[str, Callable[[str], dict[str, Any]]] = {
    "fsdp2": lambda folder: fsdp2(load(folder)),
    "fsdp2_checkpointed": lambda folder: fsdp2(checkpointed(folder)),
    "ddp": lambda folder: ddp(load(folder)),
    "ddp_checkpointed": lambda folder: ddp(checkpointed(folder)),
    "ddp_unused": lambda folder: ddp(load(folder), find_unused_parameters=True),
    "fsdp1_flat": lambda folder: fsdp1(load(folder), use_orig_params=False),
    "fsdp1_flat_checkpointed": lambda folder: fsdp1(checkpointed(folder), use_orig_params=False),
    "fsdp1_flat_root_only": lambda folder: fsdp1(load(folder), use_orig_params=False, layers=False),
    "fsdp1_flat_wrapped_later": lambda folder: fsdp1(load(folder), use_orig_params=False, wrapped_later=True),
    "fsdp1_original": lambda folder: fsdp1(load(folder), use_orig_params=True),
    "fsdp1_original_checkpointed": lambda folder: fsdp1(checkpointed(folder), use_orig_params=True),
}
KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    **EVERY_GRADIENT,
    "tensor_parallel": tensor_parallel,
    "expert_parallel_masking": expert_parallel_masking,
    "expert_parallel_dispatch": expert_parallel_dispatch,
    "ulysses": ulysses,
}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, kind in KINDS.items():
        try:
            results[name] = kind(folder)
        except Exception as error:  # the other kinds still count; the test shows this one
            import traceback

            results[name] = {"error": "".join(traceback.format_exception(error))}
    torch.save(results, pathlib.Path(folder, f"rank{dist.get_rank()}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
