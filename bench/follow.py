"""Measure what it costs that a pass finds its own rows: `follow` against `replay` on the same tokens, in turns.

    python -m bench.follow             # on this machine: a GPU if there is one, else the CPU
    python -m bench.follow --device cpu

A step is forward + backward of the model of bench.replay, over a packed bin and over a batch that is padded on its
left. Each round runs every mode once, in another order; the figure is the median over rounds of mode / replay within
the round. "replay again" shows what the method cannot tell apart, and bench.verdicts decides with it.

The store holds more sequences than the batch, and nothing is kept from pass to pass: every pass reads its tokens, finds
each sequence and lays out its rows. On the CPU, the figures are CPU time of the one thread, which other work on the
machine lengthens less. The last line of a layout is the part of a followed step in which this happens; a GPU waits
meanwhile.
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

from bench.replay import make_model, time_rounds
from bench.verdicts import Share, verdict
from router_replay import RouterReplay, Routes, RouteStore, Sample, logprobs, pack
from router_replay.replay.follow import Following

LIMIT = 1.02
OTHERS = 256  # sequences in the store that the batch does not use


def make_samples(replayer: RouterReplay, count: int, length: int, vocabulary: int) -> list[Sample]:
    """Samples of one prompt, with rows for all tokens but the last, as from an engine."""
    rng = np.random.default_rng(0)
    spec = replayer.spec
    prompt = rng.integers(1, vocabulary, length // 4)
    found = []
    for _ in range(count):
        scores = rng.random((length, len(spec.layers), spec.num_experts), np.float32)
        routes = Routes(np.argsort(scores, axis=-1)[..., : spec.top_k], spec, np.arange(length) < length - 1)
        tokens = np.concatenate([prompt, rng.integers(1, vocabulary, length - len(prompt))])
        found.append(Sample(tokens, np.zeros(length), np.ones(length, bool), routes))
    return found


def make_store(replayer: RouterReplay, samples: list[Sample], vocabulary: int) -> RouteStore:
    """A store of these samples and of `OTHERS` more, which begin as they do."""
    rng = np.random.default_rng(1)
    store = RouteStore(replayer.spec)
    for one in samples:
        store.add_trajectory(one)
    length = len(samples[0])
    for number in range(OTHERS):
        one = samples[number % len(samples)]
        tokens = np.concatenate([one.token_ids[: length // 2], rng.integers(1, vocabulary, length - length // 2)])
        assert one.routes is not None
        store.add(tokens, one.routes.read())
    return store


def padded(samples: list[Sample], device: str) -> tuple[dict[str, Any], Routes]:
    """The samples, each shorter by one than the one before, padded on the left, and their rows."""
    width = len(samples[0])
    tokens, mask, rows = np.zeros((len(samples), width), np.int64), np.zeros((len(samples), width), np.int64), []
    for number, one in enumerate(samples):
        length = width - number
        tokens[number, number:], mask[number, number:] = one.token_ids[:length], 1
        assert one.routes is not None
        rows += [Routes.missing(number, one.routes.spec), one.routes.read(0, length)]
    inputs = {"input_ids": torch.from_numpy(tokens).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
    return inputs, Routes.concat(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    device = arguments.device
    rounds = arguments.rounds or (21 if device == "cuda" else 51)
    count, length = (16, 512) if device == "cuda" else (8, 64)
    if device == "cpu":
        torch.set_num_threads(1)  # steadier than two threads on a machine with other work
    model = make_model(device)
    replayer = RouterReplay(model)
    vocabulary = model.config.vocab_size
    samples = make_samples(replayer, count, length, vocabulary)
    store = make_store(replayer, samples, vocabulary)
    batch = pack(samples, count * length)
    bin_on_device = batch.to_torch(device)
    inputs, padded_rows = padded(samples, device)

    def packed_step() -> None:
        logprobs(model, bin_on_device).sum().backward()
        model.zero_grad(set_to_none=False)

    def padded_step() -> None:
        model(**inputs, use_cache=False).logits.float().logsumexp(-1).sum().backward()
        model.zero_grad(set_to_none=False)

    def replayed(step: Callable[[], None], routes: Any) -> Callable[[], None]:
        def run() -> None:
            with replayer.replay(routes):
                step()

        return run

    def followed(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with replayer.follow(store):
                step()

        return run

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.process_time
    finding, plan_for = list[float](), Following.plan_for

    def timed_plan(*arguments: Any) -> Any:
        begin = clock()
        try:
            return plan_for(*arguments)
        finally:
            finding.append(clock() - begin)

    Following.plan_for = timed_plan  # type: ignore[method-assign]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"\nForward + backward, {count} sequences of {length} tokens, {len(store)} stored, {where}, {rounds} rounds\n"
    )
    print("| layout | mode | ms, median | against replay |\n| --- | --- | ---: | ---: |")
    verdicts = {}
    layouts: list[tuple[str, Callable[[], None], Any]] = [
        ("packed", packed_step, batch.routes),
        ("padded left", padded_step, padded_rows),
    ]
    for layout, step, routes in layouts:
        modes = {"replay": replayed(step, routes), "replay again": replayed(step, routes), "follow": followed(step)}
        finding.clear()
        seconds = time_rounds(modes, rounds, wait, clock)
        ratios = {
            name: statistics.median(a / b for a, b in zip(taken, seconds["replay"], strict=True))
            for name, taken in seconds.items()
        }
        for name, taken in seconds.items():
            print(f"| {layout} | {name} | {statistics.median(taken) * 1e3:.1f} | {ratios[name]:.4f}x |")
        found_in = statistics.median(finding)
        part = found_in / statistics.median(seconds["follow"])
        print(f"| {layout} | of follow, to find the rows | {found_in * 1e3:.2f} | {part:.4f} of follow |")
        share, same = (Share.of(seconds["replay"], seconds[name]) for name in ("follow", "replay again"))
        verdicts[layout] = verdict(share, 1 / LIMIT, same)
    print(f"\nfollow costs at most {LIMIT}x of replay on the same tokens:")
    for layout, found in verdicts.items():
        print(f"- {layout}: {found}")
    return int(any(found == "MISSED" for found in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
