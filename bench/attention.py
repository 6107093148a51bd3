"""Measure what packing costs: a packed bin against the same sequences without packing, forward + backward.

    python -m bench.attention                     # on a GPU if there is one
    python -m bench.attention --device cpu

Three comparisons, each with its modes interleaved in one run, and medians over rounds of the ratio within a round:

1. Equal sequences: one packed bin against a batch of one row per sequence, which is the model's own causal attention.
   The masked attention (one mask over the whole bin) is shown beside them.
2. The cost per token as the bin grows.
3. A mini-batch as in the demo (CPU only): packed log-probs against the padded batch with its attention mask, as
   trainers without packing compute them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.replay import time_rounds
from router_replay import Sample, logprobs, pack
from router_replay.batch import Batch
from router_replay.forward import use_packed_attention
from router_replay.rl.config import tiny_folder
from router_replay.rl.environments.problems import operands

UNPACKED_LIMIT, PADDED_LIMIT = 1.1, 1.0
GROWTH_LIMIT = {"cuda": 1.1, "cpu": 1.25}  # the activations of a larger bin leave the caches of a CPU
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": {"hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 16, "num_experts": 64,
                  "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000},
        "length": 1024, "bin": 16_384, "bins": (4096, 8192, 16_384, 32_768, 65_536), "layers": 4,
    },
    "cpu": {
        "model": {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_experts": 16,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256},
        "length": 128, "bin": 1024, "bins": (512, 1024, 2048, 4096), "layers": 2,
    },
}  # fmt: skip


def make_model(device: str, layers: int | None = None) -> Any:
    shape = {**SHAPES[device]["model"], **({"num_hidden_layers": layers} if layers else {})}
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, num_experts_per_tok=8, max_position_embeddings=8192))
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()


def make_batch(lengths: Sequence[int], vocabulary: int) -> Batch:
    rng = np.random.default_rng(0)
    made = [Sample(rng.integers(2, vocabulary, n), np.zeros(n), np.ones(n, bool), None) for n in lengths]
    return pack(made, sum(lengths))


def packed_step(model: Any, batch: Any) -> Callable[[], None]:
    """Return a step over a packed bin: log-probs of its labels, and their gradients."""

    def step() -> None:
        logprobs(model, batch).sum().backward()
        model.zero_grad(set_to_none=True)

    return step


def rows_step(model: Any, tokens_NL: torch.Tensor, mask_NL: torch.Tensor | None = None) -> Callable[[], None]:
    """Return a step over one row per sequence: the log-probs of the labels from the model's logits."""
    labels_NL = tokens_NL[:, 1:]
    real_NL = torch.ones_like(labels_NL, dtype=torch.bool) if mask_NL is None else mask_NL[:, 1:].bool()

    def step() -> None:
        logits = model(input_ids=tokens_NL, attention_mask=mask_NL, use_cache=False).logits[:, :-1].float()
        found = logits.gather(-1, labels_NL[..., None])[..., 0] - logits.logsumexp(-1)
        (found * real_NL).sum().backward()
        model.zero_grad(set_to_none=True)

    return step


def hidden_steps(model: Any, masked: Any, batch: Batch, length: int, device: str) -> dict[str, Callable[[], None]]:
    """Return steps through the decoder without its output matrix, which the modes would compute in different ways."""
    from router_replay.forward.packing import packed_arguments

    tensors = batch.to_torch(device)
    rows_NL = tensors.token_ids.view(-1, length)

    def bin_step(one: Any) -> Callable[[], None]:
        def step() -> None:
            given = packed_arguments(one, tensors.token_ids[None], tensors.position_ids[None], tensors.boundaries)
            one.model(**given, use_cache=False).last_hidden_state.sum().backward()
            one.zero_grad(set_to_none=True)

        return step

    def rows() -> None:
        model.model(input_ids=rows_NL, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    return {"rows": rows, "rows again": rows, "packed": bin_step(model), "packed, masked": bin_step(masked)}


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def show(seconds: dict[str, list[float]], base: str) -> None:
    print(f"| mode | ms, median | against {base} |\n| --- | ---: | ---: |")
    for name, taken in seconds.items():
        print(f"| {name} | {statistics.median(taken) * 1e3:.1f} | {ratio(seconds, name, base):.3f}x |")


def said(what: str, found: float, limit: float) -> bool:
    """Print the verdict; return whether the limit was missed."""
    print(f"\n{what} {found:.3f}x (limit {limit}x): {'MISSED' if found > limit else 'ok'}")
    return found > limit


def equal_sequences(device: str, rounds: int, wait: Callable[[], None]) -> bool:
    shape = SHAPES[device]
    model = make_model(device)
    masked = copy.deepcopy(model)
    used = use_packed_attention(model)
    batch = make_batch([shape["length"]] * (shape["bin"] // shape["length"]), model.config.vocab_size)
    seconds = time_rounds(hidden_steps(model, masked, batch, shape["length"], device), rounds, wait)
    print(f"\n## {len(batch)} tokens in sequences of {shape['length']}, attention: {used}\n")
    show(seconds, "rows")
    return said("a packed bin against one row per sequence:", ratio(seconds, "packed", "rows"), UNPACKED_LIMIT)


def growing_bins(device: str, rounds: int, wait: Callable[[], None]) -> bool:
    shape = SHAPES[device]
    model = make_model(device, shape["layers"])
    used = use_packed_attention(model)
    length, bins = shape["length"], shape["bins"]
    batches = {size: make_batch([length] * (size // length), model.config.vocab_size) for size in bins}
    steps = {f"{size} slots": packed_step(model, batch.to_torch(device)) for size, batch in batches.items()}
    seconds = time_rounds(steps, rounds, wait)
    per_token = {name: [one / size for one in seconds[name]] for name, size in zip(steps, bins, strict=True)}
    first = next(iter(per_token))
    print(f"\n## Bins of sequences of {length}, {shape['layers']} layers, attention: {used}\n")
    print(f"| bin | us per token, median | against {first} |\n| --- | ---: | ---: |")
    for name, taken in per_token.items():
        print(f"| {name} | {statistics.median(taken) * 1e6:.3f} | {ratio(per_token, name, first):.3f}x |")
    names = list(per_token)
    growth = max(ratio(per_token, large, small) for n, small in enumerate(names) for large in names[n + 1 :])
    return said("the most that a token costs in a larger bin against a smaller one:", growth, GROWTH_LIMIT[device])


def demo_lengths(count: int) -> list[int]:
    """Return lengths of prompt and answer as in the demo: 12+34= and 46 with its end; one in twenty rambles on."""
    rng = np.random.default_rng(0)
    lengths = []
    for problem in range(count // 8):
        first, second = operands(0, problem, count=2, digits=2)
        prompt, answer = len(f"{first}+{second}="), len(str(first + second)) + 1
        lengths += [prompt + (8 if rng.random() < 0.05 else answer) for _ in range(8)]
    return lengths


def demo_mini_batch(rounds: int) -> bool:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32, attn_implementation="sdpa").train()
    masked = copy.deepcopy(model)
    used = use_packed_attention(model)
    lengths = demo_lengths(128)
    batch = make_batch(lengths, model.config.vocab_size)
    rows = [torch.from_numpy(tokens) for tokens in batch.per_sample(batch.token_ids)]
    tokens_NL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_NL = torch.arange(tokens_NL.shape[1]) < torch.tensor(lengths)[:, None]
    padded = rows_step(masked, tokens_NL, mask_NL.long())
    tensors = batch.to_torch()
    steps = {
        "padded": padded,
        "padded again": padded,
        "packed": packed_step(model, tensors),
        "packed, masked": packed_step(masked, tensors),
    }
    seconds = time_rounds(steps, rounds, lambda: None)
    shape = f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens"
    print(
        f"\n## A mini-batch of the demo: {shape}, {len(batch)} slots, padded {tokens_NL.numel()}, attention: {used}\n"
    )
    show(seconds, "padded")
    return said("a packed mini-batch against the padded one:", ratio(seconds, "packed", "padded"), PADDED_LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    if device == "cpu":
        torch.set_num_threads(1)  # steadier than two threads on a machine with other work
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    print(f"\nForward + backward on {torch.cuda.get_device_name() if device == 'cuda' else 'one CPU thread'}")
    missed = equal_sequences(device, rounds, wait)
    missed |= growing_bins(device, rounds, wait)
    if device == "cpu":
        missed |= demo_mini_batch(rounds)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
