"""Measure what routers in float32 do to the gap between vLLM and a trainer that both compute in bfloat16.

    python -m bench.router_dtype

vLLM samples answers to additions with the tiny model, once with its routers in the model's dtype and once in float32.
A transformers model with the same weights computes the log-probs of the same tokens, with its routers in either dtype,
once with its own experts (live) and once with those of vLLM (replayed).
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from router_replay import Batch, RouterReplay, Trajectory, logprobs, measure, pack
from router_replay.engines import Request, Sampling, VllmEngine
from router_replay.engines.environment import environment
from router_replay.forward.router_precision import compute_routers_in_float32
from router_replay.rl.config import tiny_folder
from router_replay.rl.engine_start import CPU_ENVIRONMENT, QUIET

RouterDtype = Literal["model", "float32"]
DTYPES: tuple[RouterDtype, ...] = ("model", "float32")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    chosen = parser.parse_args(arguments)
    folder = tiny_folder()
    print("| routers of vLLM | routers of the trainer | routers that agree | k3, live | k3, replayed | tokens |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for engine_dtype in DTYPES:
        batches = rollouts(folder, engine_dtype, chosen.prompts)
        for trainer_dtype in DTYPES:
            agreement, live, replayed, tokens = gaps(folder, trainer_dtype, batches)
            cells = f"{100 * agreement:.2f} % | {live:.2e} | {replayed:.2e} | {tokens:,}"
            print(f"| {engine_dtype} | {trainer_dtype} | {cells} |", flush=True)
    return 0


def rollouts(folder: pathlib.Path, router_dtype: RouterDtype, prompts: int) -> list[Batch]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rng = np.random.default_rng(0)
    questions = [f"{a}+{b}=" for a, b in rng.integers(10, 100, (prompts, 2))]
    requests = [Request(tuple(tokenizer.encode(text)), Sampling(8, 1.0, n=8, seed=1)) for text in questions]
    on_cpu = not torch.cuda.is_available()
    shape: dict[str, Any] = {"enforce_eager": True, "block_size": 32} if on_cpu else {}
    with environment({**(CPU_ENVIRONMENT if on_cpu else {}), **QUIET}, keep_existing=True):
        engine = VllmEngine(str(folder), router_dtype=router_dtype, dtype="bfloat16", max_model_len=64, **shape)
    trajectories = []
    with engine:
        for request, samples in zip(requests, engine.generate_each(requests), strict=True):
            for sample in samples:
                trajectory = Trajectory(engine.spec)
                trajectory.append(request.token_ids, sample.token_ids, sample.logprobs, sample.routes)
                trajectories.append(trajectory)
    return [pack(trajectories[start : start + 256], max_tokens=8192) for start in range(0, len(trajectories), 256)]


def gaps(folder: pathlib.Path, router_dtype: RouterDtype, batches: list[Batch]) -> tuple[float, float, float, int]:
    """Return the share of routers that agree, k3 live and replayed, and the number of tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    ).eval()
    if router_dtype == "float32":
        compute_routers_in_float32(model)
    replayer = RouterReplay(model, agreement=True)
    live, replayed, rollout = [], [], []
    with torch.no_grad():
        for batch in batches:
            mask = batch.label_mask
            live.append(logprobs(model, batch)[mask])
            with replayer.replay(batch):
                replayed.append(logprobs(model, batch)[mask])
            rollout.append(batch.label_logprobs[mask])
    sampled = np.concatenate(rollout)
    k3 = [measure.logprob_gap(torch.cat(values), sampled).k3 for values in (live, replayed)]
    agreement = replayer.stats.agreement
    assert agreement is not None  # asked for above
    return float(np.mean(agreement)), k3[0], k3[1], len(sampled)


if __name__ == "__main__":
    raise SystemExit(main())
