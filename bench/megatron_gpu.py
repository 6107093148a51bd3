"""Measure what MegatronReplay costs in a training step of megatron-core, and compare its losses with transformers.

    python -m bench.megatron_gpu                       # one GPU with megatron-core: NCCL, one process
    python -m bench.megatron_gpu --recompute full      # and with recompute in backward
    python -m bench.megatron_gpu --tiny --rounds 2     # a check that all of it runs; on a CPU too, over gloo

It needs megatron-core 0.16.1 (requirements/megatron.txt) and the folder tests/. The timed model is a Qwen3-MoE in bf16
with random weights. Its routes are those that it chooses itself, so that both kinds of step do the same work. In each
round both run one step, in turns. The memory of both is the peak of one more step. The losses are those of a small
model in float32, trained for a few steps with the same routes: here by megatron-core, and on the CPU by transformers
with RouterReplay.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.megatron_real import tiny

# isort: split
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from bench.verdicts import Share, verdict
from router_replay import RouterReplay
from router_replay.replay.megatron import MegatronReplay
from tests.makers import random_routes

GOAL = 1.02
GPU = torch.cuda.is_available()
MEMORY_SLACK = 1 << 20  # bytes; counters, and a live step whose experts get a few tokens more or less
# Without Transformer Engine, megatron-core calls the experts one after the other, and the host needs about 320 ms per
# step for that. Its scatter hides a difference of 2 %, so the GPU must need longer. The model has 2.8 billion weights,
# of which a token uses 0.82 billion. Two micro-batches of 16 sequences are 1.6e14 operations: 540 ms at 300 TFLOP/s.
LARGE: dict[str, Any] = dict(  # noqa: C408
    vocab_size=32000, hidden_size=4096, intermediate_size=8192, moe_intermediate_size=1536, num_hidden_layers=4,
    num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=32, num_experts_per_tok=8,
    mlp_only_layers=[], max_position_embeddings=4096, initializer_range=0.02,
)  # fmt: skip
LARGE_SHAPE = (16, 1024, 2)  # sequences, length, micro-batches; attention here holds [sequences, heads, length, length]


def placed(chunk: Any, dtype: torch.dtype = torch.float32) -> Any:
    return (chunk.cuda() if GPU else chunk).to(dtype)


def step(chunk: Any, batches: Sequence[Tensor]) -> list[Tensor]:
    """Run forward and backward for all micro-batches; return the losses of their tokens."""
    losses: list[Tensor] = []
    length = batches[0].shape[1] - 1
    device = next(chunk.parameters()).device
    positions = torch.arange(length, device=device).expand(len(batches[0]), length)
    mask = torch.triu(torch.ones(length, length, device=device), 1).bool()[None, None]

    def forward_step(data: Any, model: Any) -> Any:
        batch = next(data)

        def loss(found: Tensor) -> Any:
            losses.append(found.detach())
            return found.float().mean(), {}

        return model(batch[:, :-1].contiguous(), positions, mask, labels=batch[:, 1:].contiguous()), loss

    chunk.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch.to(device) for batch in batches]),
        model=chunk,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=len(batches[0]),
        forward_only=False,
    )
    return losses


def compare_losses(steps: int = 5, rate: float = 0.5) -> float:
    """Train a small model here and on the CPU with the same routes; return the largest difference of their losses."""
    hf = tiny.hf_model()
    (chunk,) = tiny.megatron_model(hf)
    chunk = placed(chunk)
    ours, theirs = MegatronReplay([chunk]), RouterReplay(hf)
    batches = tiny.tokens(2)
    largest = 0.0
    print(
        f"\nlosses of {steps} steps, megatron-core {'on the GPU' if GPU else 'on the CPU'} and transformers on the CPU"
    )
    for number in range(steps):
        routes = [random_routes(16, ours.spec, 2 * number + one) for one in range(2)]
        with ours.replay(routes, micro_batch_size=2, num_microbatches=2, forward_only=False):
            mine = torch.cat(step(chunk, batches)).cpu()
        hf.zero_grad()
        other = []
        for batch, rows in zip(batches, routes, strict=True):
            with theirs.replay(rows):
                losses = tiny.hf_losses(hf, batch)
                (losses.mean() / len(batches)).backward()
            other.append(losses.detach())
        difference = float((mine - torch.cat(other)).abs().max())
        largest = max(largest, difference)
        print(f"  {number}: {mine.mean():.6f} {torch.cat(other).mean():.6f}, tokens differ by up to {difference:.1e}")
        with torch.no_grad():
            for parameter in [*chunk.parameters(), *hf.parameters()]:
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return largest


def timed(chunk: Any, batches: Sequence[Tensor]) -> float:
    wait()
    start = time.perf_counter()
    step(chunk, batches)
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def peak_of(chunk: Any, run: Any) -> int:
    """Return the most bytes that tensors have on the device during `run`, above those of the model before it.

    This reads what tensors requested. `max_memory_allocated` counts the blocks that they got, which may be larger by up
    to 1 MiB each: equal steps can differ by several MiB there, since earlier steps decide which blocks are free.
    """
    if not GPU:
        return 0
    chunk.zero_grad()  # otherwise the gradients of the step before count as part of the model
    gc.collect()
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    wait()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps with replay and without, in turns; return the figures."""
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    more: dict[str, Any] = {}
    if not arguments.tiny:
        more = {"params_dtype": dtype, "bf16": True, "perform_initialization": False, "use_cpu_initialization": not GPU}
    with torch.device("cuda" if GPU else "cpu"):  # random numbers take long on a host
        hf = tiny.hf_model(**({} if arguments.tiny else LARGE))
    (chunk,) = tiny.megatron_model(hf, **more, **tiny.RECOMPUTE[arguments.recompute])
    chunk = placed(chunk, dtype)
    del hf
    sequences, length, count = (2, tiny.LENGTH, 2) if arguments.tiny else LARGE_SHAPE
    batches = tiny.tokens(count, sequences, length)
    replayer = MegatronReplay([chunk])
    shape = {"num_microbatches": count, "micro_batch_size": sequences, "seq_length": length, "forward_only": False}
    with replayer.record() as recorded:
        step(chunk, batches)
    routes = recorded.gather()
    seconds: dict[str, list[float]] = {"live": [], "again": [], "replay": []}

    def one(kind: str) -> float:
        if kind != "replay":
            return timed(chunk, batches)
        with replayer.replay(routes, **shape):  # type: ignore[arg-type]
            return timed(chunk, batches)

    for number in range(arguments.warm_up + arguments.rounds):
        for kind in list(seconds)[:: 1 if number % 2 else -1]:
            took = one(kind)
            if number >= arguments.warm_up:
                seconds[kind].append(took)
        print(f"  round {number + 1} of {arguments.warm_up + arguments.rounds}, {took:.2f} s", end="\r", flush=True)
    peaks = {kind: peak_of(chunk, lambda kind=kind: one(kind)) for kind in seconds}
    tokens, spec = sequences * length, replayer.spec
    return {
        "parameters": sum(parameter.numel() for parameter in chunk.parameters()),
        "seconds": seconds,
        "peaks": peaks,
        "ids": tokens * spec.row_bytes,  # one byte per id up to 256 experts
        "column": tokens * spec.top_k * 8,
        "stats": replayer.stats.rows_replayed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences, as a check")
    parser.add_argument("--recompute", default="none", choices=["none", "full", "moe"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--out", help="write all figures to this JSON file")
    arguments = parser.parse_args()
    tiny.start(backend="nccl" if GPU else "gloo")
    where = torch.cuda.get_device_name() if GPU else "CPU, 1 thread"
    largest = compare_losses()
    found = measure(arguments)
    seconds = found["seconds"]
    print(f"\n{found['parameters'] / 1e6:.0f}M parameters, {where}, recompute {arguments.recompute}, rounds in turns")
    for kind, times in seconds.items():
        print(f"  {kind:7} {1e3 * statistics.median(times):9.2f} ms per step")
    share, same = Share.of(seconds["live"], seconds["replay"]), Share.of(seconds["live"], seconds["again"])
    said = verdict(share, 1 / GOAL, same)
    print(
        f"  with replay {1 / share.median:.3f}x of without (speed {share}; two live steps {same}): goal {GOAL}x, {said}"
    )
    extra, again = (found["peaks"][kind] - found["peaks"]["live"] for kind in ("replay", "again"))
    allowed = found["ids"] + found["column"] + MEMORY_SLACK
    fits = extra <= allowed
    peak = f"{found['peaks']['live']:,} bytes, {extra:+,} with replay ({again:+,} in a second live step): goal "
    peak += f"{allowed:+,}, {'kept' if fits else 'MISSED'}"
    print(
        f"  routes of a micro-batch: {found['ids']:,} bytes of ids and one widened column of {found['column']:,}; peak "
        + (peak if GPU else "not measured here")
    )
    print(f"  losses differ from transformers by up to {largest:.1e}: {'kept' if largest < 1e-3 else 'MISSED'}")
    if arguments.out:
        found |= {"largest difference": largest, "ratio": 1 / share.median, "verdict": said}
        found |= {"extra bytes": extra, "allowed bytes": allowed}
        pathlib.Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")
    return int(said == "MISSED" or not fits or largest >= 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
