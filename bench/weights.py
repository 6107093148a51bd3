"""Measure how new weights reach vLLM: gather, publish, vLLM's own loader, and written into its tensors directly.

    python -m bench.weights                   # the tiny model on the CPU
    python -m bench.weights --device cuda     # 446M parameters, as on the H200 of docs/performance.md
    python -m bench.weights --device cuda --ipc     # by CUDA IPC, as training does on one GPU, instead of shared memory

In every round the policy's weights are gathered and published, and the engine loads them twice: once by vLLM's loader
and once directly, as far as the plugin's check allows it. The columns of a round stand side by side.
Between the rounds two sets of weights alternate, and after each load the engine's answer must be that of these weights.
NCCL between several GPUs is not run here.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from bench.train_gpu import make_model
from router_replay.engines import Completion, Request, Sampling, VllmEngine
from router_replay.engines.environment import environment
from router_replay.rl.config import EngineConfig, load_config
from router_replay.rl.engine_start import CPU_ENVIRONMENT, QUIET
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.weights.lending import lending
from router_replay.rl.weights.sync import WeightSync

COLUMNS = ("gather", "cast and publish", "vLLM's loader", "direct", "of it by the loader", "whole update")
GOAL = 0.15  # seconds on one GPU, for weights that are published and in the engine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="the tiny model on a GPU, too")
    parser.add_argument("--ipc", action="store_true", help="publish to memory of the GPU that both use")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place, "model")
        _, parameters = make_model(folder, tiny=chosen.tiny or chosen.device == "cpu")
        print(f"{parameters:,} parameters, {2 * parameters / 2**20:,.0f} MiB in bfloat16, {chosen.device}")
        measure(folder, chosen.device, chosen.rounds, chosen.ipc)
    return 0


def measure(folder: pathlib.Path, device: str, rounds: int, ipc: bool) -> None:
    """Print one line per round, and the medians."""
    ranks = Ranks(0, 1, 1, torch.device(device))
    config = load_config(None, [f"model.path={folder}", f"model.device={device}", "model.dtype=bfloat16"])
    policy = Policy(config, ranks, folder)
    way: Literal["cuda_ipc", "shared_memory"] = "cuda_ipc" if ipc else "shared_memory"
    settings = EngineConfig(kind="vllm", dtype="bfloat16", transfer=way)
    sync = WeightSync(settings, policy.model, policy.router_names)
    # Weights in another dtype make the plugin forget its plan, so that vLLM's loader takes the next ones.
    other = WeightSync(EngineConfig(kind="vllm", dtype="float32"), policy.model, policy.router_names)
    first: dict[int, Completion] = {}
    lines: list[list[float]] = []
    with start(folder, device) as engine:
        print(f"new weights: {sync.prepare([engine], policy.model.state_dict(), policy.gpu)}")
        print(f"| round | {' | '.join(f'{name}, ms' for name in COLUMNS)} |")
        print(f"| --- |{' ---: |' * len(COLUMNS)}")
        for number in range(rounds):
            change(policy, up=number % 2 == 0)
            with lending(policy, ranks) as lent:
                assert lent is not None
                gathered, _ = timed(device, on_host, lent.weights)
                published, source = timed(device, sync.source, lent.weights, number)
                engine.update_weights(other.source(lent.weights, number), 3 * number + 1)
            engine.update_weights(source, 3 * number + 2)
            by_loader = engine.report()["weights"]
            answers = [ask(engine)]
            whole, _ = timed(device, engine.update_weights, source, 3 * number + 3)
            direct = engine.report()["weights"]
            answers.append(ask(engine))
            for answer in answers:
                known = first.setdefault(number % 2, answer)
                assert np.array_equal(answer.logprobs, known.logprobs), "the engine does not have these weights"
            seconds = [
                *(gathered, published, by_loader["seconds_loader"]),
                *(direct["seconds_direct"] + direct["seconds_loader"], direct["seconds_loader"], whole),
            ]
            lines.append(seconds)
            print(f"| {number + 1} | {' | '.join(f'{1000 * one:,.1f}' for one in seconds)} |", flush=True)
        medians = [statistics.median(column) for column in zip(*lines, strict=True)]
        print(f"| median | {' | '.join(f'{1000 * one:,.1f}' for one in medians)} |")
        print(f"direct takes {medians[3] / medians[2]:.2f} of the time of vLLM's loader")
        if device == "cuda":
            whole = medians[1] + medians[-1]
            said = "kept" if whole <= GOAL else "MISSED"
            print(f"publish and update: {whole:.3f} s (goal {GOAL} s): {said}")
        print(f"{direct['direct_parameters']} parameters are written directly; vLLM's loader loads:")
        for reason, count in reasons(direct["by_loader"]).items():
            print(f"    {count} layers: {reason}")
    sync.close()
    other.close()


def start(folder: pathlib.Path, device: str) -> VllmEngine:
    few: dict[str, Any] = {"cudagraph_capture_sizes": [1, 8]}  # for the one request of a round
    shape = {"enforce_eager": True, "block_size": 32} if device == "cpu" else few
    more = CPU_ENVIRONMENT if device == "cpu" else {}
    with environment({**more, **QUIET}, keep_existing=True):
        return VllmEngine(str(folder), dtype="bfloat16", max_model_len=64, **shape)


@torch.no_grad()
def change(policy: Policy, up: bool) -> None:
    """Take the weights from one set to the other and back; powers of two change no bit."""
    for parameter in policy.model.parameters():
        parameter.mul_(2.0 if up else 0.5)


def ask(engine: VllmEngine) -> Completion:
    [completion] = engine.generate([Request((5, 6, 7, 8), Sampling(max_tokens=8, temperature=0.0))])
    return completion


def reasons(by_loader: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason in by_loader.values():
        found[reason] = found.get(reason, 0) + 1
    return found


def on_host(tensors: Mapping[str, torch.Tensor]) -> None:
    """Read every tensor into host memory, one at a time."""
    for tensor in tensors.values():
        tensor.cpu()


def timed(device: str, work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of a call and its result."""
    began = time.perf_counter()
    result = work(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


if __name__ == "__main__":
    raise SystemExit(main())
