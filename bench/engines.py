"""Measure what routes cost in vLLM: capture, forced prefixes, long conversations, and the client of an HTTP server.

    python -m bench.engines                    on a GPU: half the layers of Qwen3-30B-A3B, random weights, CUDA graphs
    python -m bench.engines --size small       a 2.7B MoE whose steps take less time on the GPU than in vLLM's Python
    python -m bench.engines --model FOLDER     the same with a model of your own
    python -m bench.engines --size tiny        the same program on a tiny model, also on a CPU
    python -m bench.engines --client           payload and client CPU only; needs no vLLM

The engines run side by side and take turns: a round has one short turn of every kind, in random order. Only turns of
the same round are compared. A figure has an interval with a confidence of 95 %.
Two engines that do not differ are compared in the same way. If they seem to differ by as much as the goal asks for,
there is no verdict. The exit code is 1 if a goal was missed, and 2 if there is no verdict.

Every turn is written to OUT/turns.jsonl at once, and the table to OUT/summary.txt after every round.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import io
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench.engine_host import Cost, Host, Work
from bench.engine_probe import PARTS
from bench.verdicts import QUANTILE, Share, verdict
from router_replay import kernel, wire
from router_replay.engines.vllm.http import samples_of
from router_replay.engines.vllm.plugin.routes import delivery
from router_replay.rl.engine_start import CPU_ENVIRONMENT
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

OFF = {"forced_routes": False, "enable_return_routed_experts": False}
ENGINES: dict[str, dict[str, Any]] = {
    "ours": {},
    "off": OFF,
    "off again": OFF,
    "not forced": {"forced_routes": False},
    "vLLM's delivery": {"forced_routes": False},
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 128,
    },
    "small": {
        "hidden_size": 2048, "moe_intermediate_size": 192, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 32000,
    },
    "large": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
}  # fmt: skip
VARIABLES = {"vLLM's delivery": {delivery.ENVIRONMENT: "0"}}


@dataclasses.dataclass(frozen=True)
class Turn:
    """Name one kind of turn: on which engine, and how it differs from a plain one."""

    engine: str
    forced: bool = False
    logprobs: bool = True
    conversation: bool = False
    again: bool = False  # the same turn once more, to see how far two equal turns differ


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compare two kinds of turns. `same` names the comparison of equal turns that shows the noise of this one."""

    base: Turn
    other: Turn
    same: str = ""
    goal: float | None = None


def _comparisons() -> dict[str, Comparison]:
    found = {}
    for logprobs, words in ((True, ""), (False, ", no log-probs")):
        off, ours = Turn("off", logprobs=logprobs), Turn("ours", logprobs=logprobs)
        forced, again = Turn("ours", True, logprobs), Turn("ours", logprobs=logprobs, again=True)
        same, free = f"off against off{words}", f"free against free{words}"
        found[same] = Comparison(off, Turn("off again", logprobs=logprobs))
        found[f"capture{words}"] = Comparison(off, ours, same, 0.97)
        found[free] = Comparison(ours, again)
        found[f"forced prefix{words}"] = Comparison(ours, forced, free, 0.95)
        found[f"capture, not forced{words}"] = Comparison(off, Turn("not forced", logprobs=logprobs), same)
        found[f"capture, vLLM's delivery{words}"] = Comparison(off, Turn("vLLM's delivery", logprobs=logprobs), same)
    off, again, ours = (Turn(engine, conversation=True) for engine in ("off", "off again", "ours"))
    found["conversation, off against off"] = Comparison(off, again)
    found["conversation"] = Comparison(off, ours, "conversation, off against off", 0.97)
    return found


COMPARISONS = _comparisons()
DEFAULT = [name + words for words in ("", ", no log-probs") for name in ("capture", "forced prefix")]
# What a turn costs, and how it is printed, beside the cost of its parts (`TURN`), which the verdict is about.
TURN = "turn"
QUANTITIES: dict[str, Callable[[Cost], float]] = {
    "as waited": lambda cost: cost.wait,
    "decode step": lambda cost: cost.step,
    "GPU": lambda cost: cost.gpu,
    "core CPU": lambda cost: cost.core_cpu,
    "client CPU": lambda cost: cost.client_cpu,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="large", help="of the model that is made")
    parser.add_argument("--client", action="store_true", help="only the client of an HTTP server")
    parser.add_argument("--model", help="a Hugging Face folder; by default a random model is made")
    parser.add_argument("--rounds", type=int, default=40)
    limit = "seconds of the whole program, after which no round starts"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=limit)
    parser.add_argument("--prompts", type=int, default=256, help="requests of a turn")
    parser.add_argument("--tokens", type=int, default=256, help="sampled tokens of a request")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=50, help="turns of a conversation")
    parser.add_argument("--only", action="append", choices=list(COMPARISONS), help="may be repeated")
    profiled = "at the end, show which functions the steps with prompts spend their time in"
    parser.add_argument("--profile", action="store_true", help=profiled)
    parser.add_argument("--caches", help="a folder in which vLLM keeps compiled code for the next run")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/bench_engines"), help="a folder")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {chosen.rounds}")
    client_cost()
    if chosen.client:
        return 0
    if chosen.size == "tiny":
        chosen.prompts, chosen.tokens, chosen.turns = min(chosen.prompts, 8), min(chosen.tokens, 20), 5
        chosen.prompt_tokens = min(chosen.prompt_tokens, 10)
    chosen.deadline = time.monotonic() + chosen.seconds
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen.made = chosen.model is None
        if chosen.made:
            chosen.model = folder
            save_model(pathlib.Path(folder), chosen.size)
        code = measure(chosen, _with_noise(chosen.only or DEFAULT))
    return 0 if chosen.size == "tiny" else code


def _with_noise(names: Sequence[str]) -> dict[str, Comparison]:
    """Return these comparisons, each after the comparison of equal turns that it needs."""
    wanted = dict.fromkeys(name for one in names for name in (COMPARISONS[one].same, one) if name)
    return {name: COMPARISONS[name] for name in wanted}


# -- the engines ------------------------------------------------------------------------------------


def save_model(folder: pathlib.Path, size: str) -> None:
    """Write a Qwen3-MoE of this size into the folder. The weights are random; vLLM makes those of a large model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES[size],
        architectures=["Qwen3MoeForCausalLM"],
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    if size == "large":
        config.save_pretrained(folder)
        return
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    print(f"model: {sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f}B parameters", flush=True)
    model.cpu().save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(chosen: argparse.Namespace, comparisons: dict[str, Comparison]) -> int:
    """Run the rounds and print the table; return 1 if a goal was missed, 2 if there is no verdict for one, else 0."""
    turns = list(dict.fromkeys(turn for one in comparisons.values() for turn in (one.base, one.other)))
    names = list(dict.fromkeys(turn.engine for turn in turns))
    costs: dict[Turn, list[Cost]] = {turn: [] for turn in turns}
    order = random.Random(0)
    with contextlib.ExitStack() as stack, (chosen.out / "turns.jsonl").open("w") as log:
        caches = chosen.caches or stack.enter_context(tempfile.TemporaryDirectory())
        started = time.monotonic()
        hosts = {}
        for number, name in enumerate(names):
            variables = {**VARIABLES.get(name, {}), **({} if torch.cuda.is_available() else CPU_ENVIRONMENT)}
            if chosen.size != "tiny":  # each has its own cache of compiled code, because they start at the same time
                variables["VLLM_CACHE_ROOT"] = f"{caches}/{number}"
            hosts[name] = Host(name, chosen.model, {**ENGINES[name], **_shape(chosen)}, variables)
            stack.callback(hosts[name].close)
        for name, host in hosts.items():
            print(f"{name}: {host.ready()} after {time.monotonic() - started:.0f} s", flush=True)
        for turn in turns:  # once before the first round: compiles, and makes the rows to force
            hosts[turn.engine].run(_work(turn, chosen))
        for number in range(chosen.rounds):
            if number and time.monotonic() > chosen.deadline:
                break
            for turn in order.sample(turns, len(turns)):
                cost = hosts[turn.engine].run(_work(turn, chosen))
                costs[turn].append(cost)
                facts = {"round": number, **dataclasses.asdict(turn), **dataclasses.asdict(cost)}
                print(json.dumps(facts), file=log, flush=True)
            lines, code = summary(comparisons, costs)
            (chosen.out / "summary.txt").write_text("\n".join(lines) + "\n")
        for turn in turns if chosen.profile else ():
            found = hosts[turn.engine].run(dataclasses.replace(_work(turn, chosen), profile=True)).profile
            lines.append(f"the steps with prompts, {_name(turn)}:\n{found}")
    print(*lines, sep="\n", flush=True)
    return code


def _shape(chosen: argparse.Namespace) -> dict[str, Any]:
    if chosen.size == "tiny":
        return {
            "max_model_len": 256, "max_num_seqs": 8, "dtype": "bfloat16", "block_size": 32, "enforce_eager": True,
            "use_tqdm_on_load": False,
        }  # fmt: skip
    return {
        "max_model_len": 4096, "max_num_seqs": chosen.prompts, "dtype": "bfloat16",
        # A fixed size of the cache, because engines that start at the same time cannot measure what memory is free.
        "gpu_memory_utilization": 0.28 if chosen.size == "large" else 0.2, "kv_cache_memory_bytes": 6 << 30,
        # Only the CUDA graph sizes of the batches used here, so that an engine starts faster.
        "cudagraph_capture_sizes": sorted({16, 64, chosen.prompts}),
        # A model that was made here has no weights in its folder.
        **({"load_format": "dummy"} if chosen.made and chosen.size == "large" else {}),
    }  # fmt: skip


def _work(turn: Turn, chosen: argparse.Namespace) -> Work:
    if turn.conversation:
        return Work(16, 0, max(chosen.tokens // 8, 1), turns=chosen.turns)
    return Work(chosen.prompts, chosen.prompt_tokens, chosen.tokens, turn.logprobs, turn.forced)


def summary(comparisons: dict[str, Comparison], costs: dict[Turn, list[Cost]]) -> tuple[list[str], int]:
    """Return the lines of the table, and the exit code that follows from the verdicts."""
    parts = {turn: parts_of(taken) for turn, taken in costs.items()}
    shares = {
        name: {
            TURN: Share.of_parts(parts[one.base], parts[one.other]),
            **{
                quantity: Share.of([read(cost) for cost in costs[one.base]], [read(cost) for cost in costs[one.other]])
                for quantity, read in QUANTITIES.items()
                if all(read(cost) > 0 for turn in (one.base, one.other) for cost in costs[turn])
            },
        }
        for name, one in comparisons.items()
    }
    rounds = min(len(taken) for taken in costs.values())
    columns = [quantity for quantity in (TURN, *QUANTITIES) if any(quantity in found for found in shares.values())]
    lines = [
        f"share of the speed, {rounds} rounds [95 % interval]; below 1 is slower",
        f"{'':34}" + "".join(f"{column:24}" for column in columns),
    ]
    for name, found in shares.items():
        cells = "".join(f"{found[column]!s:24}" if column in found else f"{'':24}" for column in columns)
        lines.append(f"{name:34}{cells}".rstrip())
    lines.append("milliseconds: turn, of it before the first step, until the decode steps, and after them; medians:")
    lines.append("decode step, decode step on the GPU, core CPU, client CPU of a turn")
    for turn, taken in costs.items():
        steps = np.quantile(parts[turn], QUANTILE, axis=0)
        read = [[c.step for c in taken], [c.gpu_step for c in taken]]
        read += [[c.core_cpu for c in taken], [c.client_cpu for c in taken]]
        prompts = len(steps) - 1 - min(cost.decode_steps for cost in taken)
        figures = [steps.sum(), steps[0], steps[1 : 1 + prompts].sum(), steps[-1]]
        figures += [statistics.median(one) for one in read]
        lines.append(f"{_name(turn):34}" + "".join(f"{one * 1e3:12.3f}" for one in figures))
    lines += _parts("of a decode step", {turn: [cost.parts for cost in taken] for turn, taken in costs.items()})
    lines += _parts("of a step with prompts", {turn: [cost.prompt_parts for cost in costs[turn]] for turn in costs})
    words = {
        name: verdict(shares[name][TURN], one.goal, shares[one.same][TURN])
        for name, one in comparisons.items()
        if one.goal is not None
    }
    lines += [f"{name}, goal {comparisons[name].goal}: {word}" for name, word in words.items()]
    code = 1 if "MISSED" in words.values() else 2 if any(word != "kept" for word in words.values()) else 0
    return lines, code


def parts_of(taken: Sequence[Cost]) -> list[list[float]]:
    """Return the parts of each turn: the time before the first step, each step, and the time from the last one on.

    All turns of a kind get equally many parts. The number of steps differs only if they did not wait for all requests
    (several workers); they are then counted from the end, and what a turn has more is part of the time before.
    """
    count = min(len(cost.intervals) for cost in taken)
    found = []
    for cost in taken:
        early = len(cost.intervals) - count
        found.append([cost.before + sum(cost.intervals[:early]), *cost.intervals[early:], cost.after])
    return found


def _parts(what: str, taken: dict[Turn, list[dict[str, float]]]) -> list[str]:
    """Return the lines that say where the engine core spends the time of a step."""
    lines = [f"{what}, ms, median: {', '.join(PARTS)}"]
    for turn, parts in taken.items():
        found = [statistics.median(one.get(name, 0.0) for one in parts) for name in PARTS]
        lines.append(f"{_name(turn):34}" + "".join(f"{one * 1e3:12.3f}" for one in found))
    return lines


def _name(turn: Turn) -> str:
    marks = {"forced": turn.forced, "again": turn.again, "conversation": turn.conversation}
    found = [turn.engine, *(mark for mark, there in marks.items() if there)]
    return ", ".join(found if turn.logprobs else [*found, "no log-probs"])


def seconds(work: Callable[[], object]) -> float:
    """Return how long the call took."""
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
    how = "compiled" if kernel.COMPILED else "NumPy, which is slower: python setup.py build_ext --inplace compiles it"
    print(f"the kernel that checks rows: {how}")
    print(f"client, {tokens} tokens of 48 x 8 of 128, microseconds of CPU a token:")
    print(f"  {ours_us:.2f} with rows checked, {usual_us:.2f} with json and np.load")
    print(f"bytes a token: {text / tokens:.0f} as vLLM sends them, {blob / tokens:.0f} as forced rows are sent")


if __name__ == "__main__":
    sys.exit(main())
