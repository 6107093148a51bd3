"""Measure what replay costs in training: forward + backward with replay against without, interleaved in one run.

    python -m bench.replay             # on this machine: a GPU if there is one, else the CPU
    python -m bench.replay --device cpu

On a GPU: a 2.5B-parameter Qwen3-MoE in bf16 (16 layers, 8 of 128 experts), 8192 tokens, gradients for all
parameters. On the CPU: a small one in fp32. Each round runs every mode once, in turn; the figure is the
median over rounds of mode / off within the round, so that slow moments of the machine hit both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from router_replay import RouterReplay, Routes, Sample, logprobs, pack

LIMITS = {"cpu": 1.02, "cuda": 1.01}


def make_model(device: str) -> Any:
    shape: dict[str, Any]
    if device == "cuda":
        shape = {"hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 16, "num_experts": 128,
                 "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000}  # fmt: skip
    else:
        shape = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 32,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024}  # fmt: skip
    config = Qwen3MoeConfig(**shape, num_experts_per_tok=8, max_position_embeddings=8192)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()


def make_batch(replayer: RouterReplay, tokens: int, vocabulary: int) -> Any:
    rng = np.random.default_rng(0)
    spec = replayer.spec
    ids = np.argsort(rng.random((tokens, len(spec.layers), spec.num_experts), np.float32), axis=-1)[..., : spec.top_k]
    sample = Sample(rng.integers(0, vocabulary, tokens), np.zeros(tokens), np.ones(tokens, bool), Routes(ids, spec))
    return pack([sample], tokens)


def time_rounds(
    modes: dict[str, Callable[[], None]],
    rounds: int,
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    names = list(modes)
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # no mode always follows the same one
            wait()
            begin = clock()
            modes[name]()
            wait()
            if number >= 2:
                seconds[name].append(clock() - begin)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    device = arguments.device
    rounds = arguments.rounds or (15 if device == "cuda" else 101)
    tokens = arguments.tokens or (8192 if device == "cuda" else 128)
    if device == "cpu":
        torch.set_num_threads(1)  # steadier than two threads on a machine with other work
    model = make_model(device)
    replayer = RouterReplay(model)
    batch = make_batch(replayer, tokens, model.config.vocab_size)
    plain = batch.to_torch(device)

    def step() -> None:
        logprobs(model, plain).sum().backward()
        model.zero_grad(set_to_none=False)

    def live() -> None:
        step()

    def replayed() -> None:  # from host arrays, as in a trainer: the figure includes the copy to the device
        with replayer.replay(batch.routes):
            step()

    def with_agreement() -> None:
        with replayer.replay(batch.routes, agreement=True):
            step()

    def recorded() -> None:
        with replayer.record():
            step()

    modes = {
        "off": live,
        "off again": live,
        "replay": replayed,
        "replay + agreement": with_agreement,
        "record": recorded,
    }
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = time_rounds(modes, rounds, wait)
    ratios = {
        name: statistics.median(a / b for a, b in zip(taken, seconds["off"], strict=True))
        for name, taken in seconds.items()
    }
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    print(f"\nForward + backward, {size:.2f}B parameters, {dtype}, {tokens} tokens, {where}, {rounds} rounds\n")
    print("| mode | ms, median | against off |\n| --- | ---: | ---: |")
    for name, taken in seconds.items():
        print(f"| {name} | {statistics.median(taken) * 1e3:.1f} | {ratios[name]:.4f}x |")
    missed = ratios["replay"] > LIMITS[device]
    print(f"\nreplay costs {ratios['replay']:.4f}x (limit {LIMITS[device]}x): {'MISSED' if missed else 'ok'}")
    if device == "cuda":
        missed |= not memory_is_small(modes, batch)
    return int(missed)


def memory_is_small(modes: dict[str, Callable[[], None]], batch: Any) -> bool:
    """Return whether the peak memory that a step with replay needs beyond a step without is within the limit per id."""
    peaks = {}
    for name in ("off", "replay"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        modes[name]()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated()
    ids = batch.routes.ids.size
    extra = peaks["replay"] - peaks["off"]
    print(f"peak memory: {peaks['off'] / 2**20:.1f} MiB off, {peaks['replay'] / 2**20:.1f} MiB with replay: ", end="")
    small = extra <= ids * 1.01
    print(f"{extra / ids:.3f} bytes per id ({ids:,} ids; limit 1 and the mask): {'ok' if small else 'MISSED'}")
    return small


if __name__ == "__main__":
    sys.exit(main())
