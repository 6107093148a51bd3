"""Measure what routes cost in vLLM: capture, forced prefixes, long conversations, and the client of an HTTP server.

    python -m bench.engines                on a GPU: a random 2.7B MoE in bf16, CUDA graphs on
    python -m bench.engines --tiny         the same program on a tiny model, to see that it runs
    python -m bench.engines --client       payload and client CPU only; needs no vLLM

The engines share the GPU and take turns, so that a slowdown affects all of them. One captures, forces and delivers
Routes; one captures with its routers untouched; one does so and leaves the delivery of rows to vLLM; one has capture
off. Only those that the chosen comparisons (--only) need are started. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from router_replay import wire
from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.vllm.http import samples_of
from router_replay.engines.vllm.plugin.routes import delivery
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.stitch import Trajectory

# Required speed relative to: capture off, a free prefix, capture off.
PROMISES = {"capture": 0.97, "forced prefix": 0.95, "50 turns": 0.97}
ENGINES: dict[str, dict[str, Any]] = {
    "ours": {},
    "not forced": {"forced_routes": False},
    "vLLM's delivery": {"forced_routes": False},
    "off": {"forced_routes": False, "enable_return_routed_experts": False},
}
# The first engine is the baseline of the second.
COMPARISONS = {
    "off against off": ("off", "off"),
    "capture, vLLM's delivery": ("off", "vLLM's delivery"),
    "capture, not forced": ("off", "not forced"),
    "capture": ("off", "ours"),
    "forced prefix": ("ours", "ours"),
    "50 turns": ("off", "ours"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--only", action="append", choices=list(COMPARISONS), help="may be repeated")
    chosen = parser.parse_args(arguments)
    client_cost()
    if chosen.client:
        return 0
    if chosen.tiny:
        chosen.prompts, chosen.turns, chosen.rounds = 8, 5, 2
    with tempfile.TemporaryDirectory() as folder:
        save_model(pathlib.Path(folder), chosen.tiny)
        ratios = engine_cost(folder, chosen)
    missed = [name for name, ratio in ratios.items() if ratio < PROMISES.get(name, 0)]
    for name, ratio in ratios.items():
        goal = f", goal {PROMISES[name]}{': MISSED' if name in missed else ''}" if name in PROMISES else ""
        print(f"{name:20} {ratio:.3f} of the speed{goal}")
    return 1 if missed and not chosen.tiny else 0


# -- the engine -------------------------------------------------------------------------------------


def save_model(folder: pathlib.Path, tiny: bool) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    large = {
        "hidden_size": 2048, "moe_intermediate_size": 192, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 32000,
    }  # fmt: skip
    small = {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 128,
    }  # fmt: skip
    config = Qwen3MoeConfig(
        **(small if tiny else large), norm_topk_prob=True, max_position_embeddings=8192, tie_word_embeddings=False
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    print(f"model: {sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f}B parameters")
    model.save_pretrained(folder)


def engine_cost(folder: str, chosen: argparse.Namespace) -> dict[str, float]:
    names = chosen.only or list(COMPARISONS)
    kinds = sorted({kind for name in names for kind in COMPARISONS[name]})
    shape: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256, "dtype": "bfloat16"}
    if chosen.tiny:
        shape |= {"max_model_len": 256, "max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
    else:
        # Only the CUDA graph sizes of the batches used here, so that an engine starts faster.
        shape |= {"gpu_memory_utilization": 0.84 / max(len(kinds), 3), "cudagraph_capture_sizes": [16, 64, 256]}
    tokens = 20 if chosen.tiny else 256
    vocabulary = 128 if chosen.tiny else 32000
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, vocabulary, 2 * tokens).tolist()) for _ in range(chosen.prompts)]
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)

    def batch(engine: Engine, rows: Sequence[Routes] | None = None) -> float:
        salted = [(int(rng.integers(3, vocabulary)), *prompt[1:]) for prompt in prompts]  # no prefix hits
        forced: Sequence[Routes | None] = rows or [None] * len(prompts)
        return seconds(
            lambda: engine.generate(
                [Request(p, sampling, forced_routes=f) for p, f in zip(salted, forced, strict=True)]
            )
        )

    def talk(engine: Engine) -> float:
        return conversation(engine, chosen.turns, tokens // 8)

    with running(folder, kinds, shape) as engines:
        for engine in engines.values():
            batch(engine)
        ratios = {}
        for name in names:
            base, other = (engines[kind] for kind in COMPARISONS[name])
            rows: Sequence[Routes] | None = None
            if name == "forced prefix":
                done = other.generate([Request(prompt, sampling) for prompt in prompts])
                rows = [completion.routes[: 2 * tokens] for completion in done]
            if name == "50 turns":
                times = [(talk(base), talk(other)) for _ in range(chosen.rounds)]
            else:
                times = [(batch(base), batch(other, rows)) for _ in range(chosen.rounds)]
            # Adjacent measurements are compared, so that a slowdown affects both.
            shares = [before / after for before, after in times]
            ratios[name] = statistics.median(shares)
            before, after = (statistics.median(taken) for taken in zip(*times, strict=True))
            rounds = ", ".join(f"{share:.3f}" for share in shares)
            print(f"{name}: {ratios[name]:.3f} ({before:.2f} s and {after:.2f} s; rounds {rounds})", flush=True)
        if "ours" in engines:
            print(f"forced rows so far: {engines['ours'].report()['forced_rows']}")
    return ratios


@contextlib.contextmanager
def running(folder: str, kinds: Sequence[str], shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from router_replay.engines.vllm.inprocess import VllmEngine

    with contextlib.ExitStack() as stack:
        engines = {}
        for kind in kinds:
            os.environ.pop(delivery.ENVIRONMENT, None)
            if kind == "vLLM's delivery":
                os.environ[delivery.ENVIRONMENT] = "0"
            engines[kind] = stack.enter_context(VllmEngine(folder, **ENGINES[kind], **shape))
            print(f"{kind}: rows {engines[kind].report()['delivery']}", flush=True)
        yield engines


def conversation(engine: Engine, turns: int, tokens: int) -> float:
    """Play sixteen conversations; each turn adds a few environment tokens and samples some, omitting known rows."""
    routes = engine.capabilities.routes
    agents = [Trajectory(engine.spec) for _ in range(16)]
    rng = np.random.default_rng(0)
    histories = [rng.integers(3, 100, tokens).tolist() for _ in agents]
    started = time.perf_counter()
    for _ in range(turns):
        requests = [
            Request(tuple(history), Sampling(max_tokens=tokens, ignore_eos=True), agent.next_start if routes else 0)
            for agent, history in zip(agents, histories, strict=True)
        ]
        for agent, history, request, done in zip(agents, histories, requests, engine.generate(requests), strict=True):
            if routes:
                agent.append(request.token_ids, done.token_ids, done.logprobs, done.routes, done.start)
            history += [*done.token_ids.tolist(), *rng.integers(3, 100, 8).tolist()]
    return time.perf_counter() - started


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -- the client -------------------------------------------------------------------------------------


def client_cost(tokens: int = 2000) -> None:
    """Measure the bytes of a response of 48 layers x 8 of 128, and the cost of reading it, ours and the usual way."""
    spec = RouterSpec(128, 8, tuple(range(48)), num_layers=48)
    scores = np.random.default_rng(0).random((tokens, 48, 128))
    routes = Routes(np.argpartition(scores, 8, axis=-1)[..., :8].astype(np.uint8), spec)
    content = [{"token": "token_id:5", "logprob": -0.125, "bytes": [53], "top_logprobs": []}] * tokens
    choice = {"index": 0, "token_ids": [5] * tokens, "finish_reason": "stop", "logprobs": {"content": content}}
    body = json.dumps({"choices": [{**choice, "routed_experts": wire.to_vllm(routes)}]}).encode()

    def usual() -> Any:
        parsed = json.loads(body)["choices"][0]
        return np.load(io.BytesIO(base64.b64decode(parsed["routed_experts"])))

    ours_us, usual_us = (
        min(seconds(work) for _ in range(7)) / tokens * 1e6 for work in (lambda: samples_of(body, spec), usual)
    )
    blob = len(base64.b64encode(wire.encode(routes)))
    text = len(wire.to_vllm(routes))
    print(f"client, {tokens} tokens of 48 x 8 of 128, microseconds of CPU a token:")
    print(f"  {ours_us:.2f} with rows checked, {usual_us:.2f} with json and np.load")
    print(f"bytes a token: {text / tokens:.0f} as vLLM sends them, {blob / tokens:.0f} as forced rows are sent")


if __name__ == "__main__":
    sys.exit(main())
