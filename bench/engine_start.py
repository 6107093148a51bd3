"""Measure how long vLLM takes to start on a GPU, and what shortens it.

    python -m bench.engine_start                   on a GPU: a random 2.7B MoE in bf16
    python -m bench.engine_start --model FOLDER    the same with a model of your own

It starts engines one after another, each for a copy of the model in a folder of its own, as training runs do:

    vLLM's defaults     an empty cache of compiled code, and vLLM's CUDA graph sizes
    ours, first         an empty cache, and the graph sizes of `router-replay train`
    ours, again         the cache of the start before

Seconds are from the call to the first completion of one token. What the log of vLLM says about its parts is printed
with each. Without a GPU, nothing is compiled and there is nothing to measure.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from bench.engines import save_model
from router_replay.rl.engine_start import GRAPH_SIZES

ARGUMENTS: dict[str, Any] = {"max_model_len": 4096, "dtype": "bfloat16", "gpu_memory_utilization": 0.5}
# What vLLM writes about the parts of a start, with the seconds in the first group.
PARTS = {
    "weights": r"Model loading took .*?([\d.]+) seconds",
    "compilation": r"torch\.compile took ([\d.]+) s",
    "first pass": r"profiling/warmup run took ([\d.]+) s",
    "graphs": r"Graph capturing finished in ([\d.]+) secs",
    "all after the weights": r"init engine .*? took ([\d.]+) s",
}


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; by default a random model is made")
    parser.add_argument("--start", nargs=2, metavar=("FOLDER", "SIZES"), help=argparse.SUPPRESS)
    parser.add_argument("--skip-defaults", action="store_true", help="leave out vLLM's own graph sizes")
    chosen = parser.parse_args()
    if chosen.start:
        return start(*chosen.start)
    if not torch.cuda.is_available():
        print("no GPU: vLLM compiles nothing on a CPU with our settings, so there is nothing to measure")
        return 0
    with tempfile.TemporaryDirectory() as root:
        model = pathlib.Path(chosen.model or f"{root}/model")
        if not chosen.model:
            save_model(model, "small")
        plans = [("ours, first", "ours", "b"), ("ours, again", "ours", "b")]
        if not chosen.skip_defaults:
            plans.insert(0, ("vLLM's defaults", "vllm", "a"))
        print("| start | seconds | " + " | ".join(PARTS) + " |", flush=True)
        print("| --- " + "| ---: " * (len(PARTS) + 1) + "|", flush=True)
        for number, (name, sizes, cache) in enumerate(plans):
            folder = pathlib.Path(root) / f"start_{number}"
            folder.mkdir()
            for file in model.iterdir():
                (folder / file.name).symlink_to(file.resolve())
            print(f"| {name} | {measured(folder, sizes, f'{root}/{cache}')} |", flush=True)
    return 0


def measured(folder: pathlib.Path, sizes: str, cache: str) -> str:
    """Start an engine in a process of its own; return the cells of the table."""
    command = [sys.executable, "-m", "bench.engine_start", "--start", str(folder), sizes]
    caches = {"VLLM_CACHE_ROOT": cache, "TRITON_CACHE_DIR": f"{cache}/triton", "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(
        command, env={**os.environ, **caches}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    found = re.search(r"^STARTED ([\d.]+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"the engine did not start:\n{done.stdout[-4000:]}")
    parts = (re.findall(pattern, done.stdout) for pattern in PARTS.values())
    return " | ".join([found[1], *(f"{sum(map(float, part)):.1f}" if part else "-" for part in parts)])


def start(folder: str, sizes: str) -> int:
    """Start one engine, generate a token, and print the seconds."""
    from router_replay.engines import Request, Sampling
    from router_replay.engines.vllm.inprocess import VllmEngine

    arguments = {**ARGUMENTS, **({"cudagraph_capture_sizes": list(GRAPH_SIZES)} if sizes == "ours" else {})}
    started = time.perf_counter()
    with VllmEngine(folder, **arguments) as engine:
        engine.generate([Request((5, 6, 7), Sampling(max_tokens=1))])
        print(f"\nSTARTED {time.perf_counter() - started:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
