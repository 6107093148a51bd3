"""Measure what stitching costs: 100 turns against 10 over the same 60k tokens, 48 layers, 8 of 128 experts.

    python -m bench.stitch

Each turn starts from what an engine sends: bytes of our wire, which are decoded, checked and appended. At the end the
routes are read once. The second part starts from rows that are already in memory and shows the fixed cost of a turn.
Times are the best of several interleaved runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from router_replay import RouterSpec, Routes, Trajectory, wire

TOKENS = 60_000
SPEC = RouterSpec(num_experts=128, top_k=8, layers=tuple(range(48)))
REPEATS = 7
LIMIT = 1.2


def random_rows() -> Routes:
    scores = np.random.default_rng(0).integers(0, 1 << 30, (TOKENS // 8, 48, 128), dtype=np.int32)
    return Routes(np.tile(np.argpartition(scores, 8)[..., :8].astype(np.uint8), (8, 1, 1)), SPEC)


def turn_bounds(turns: int) -> list[tuple[int, int, int]]:
    """Return (rows known before, end of prompt, end of completion) of each turn; half of a turn is sampled."""
    length = TOKENS // turns
    return [(max(0, t * length - 1), t * length + length // 2, (t + 1) * length) for t in range(turns)]


def play(turns: int, responses: list[bytes] | list[Routes], read_every_turn: bool = False) -> tuple[float, float]:
    """Return the seconds to stitch all tokens in this many turns, and how often a row was copied."""
    tokens = np.arange(TOKENS) % 50_000
    logprobs = np.full(TOKENS, -0.5, np.float32)
    begin = time.perf_counter()
    trajectory = Trajectory(SPEC)
    for (start, prompt_end, end), response in zip(turn_bounds(turns), responses, strict=True):
        assert trajectory.next_start == start
        routes = response if isinstance(response, Routes) else wire.decode(response, spec=SPEC)
        trajectory.append(tokens[:prompt_end], tokens[prompt_end:end], logprobs[prompt_end:end], routes, start=start)
        if read_every_turn:
            assert len(trajectory.routes) == end
    assert len(trajectory.routes) == TOKENS
    return time.perf_counter() - begin, trajectory._rows.rows_copied / (TOKENS - 1)


def measure(make: Callable[[Routes], bytes | Routes], read: bool) -> dict[int, tuple[float, float]]:
    rows = random_rows()
    responses = {t: [make(rows[start : end - 1]) for start, _, end in turn_bounds(t)] for t in (10, 100)}
    runs: dict[int, list[tuple[float, float]]] = {10: [], 100: []}
    for _ in range(REPEATS):
        for turns in runs:
            runs[turns].append(play(turns, responses[turns], read))  # type: ignore[arg-type]
    return {turns: min(found) for turns, found in runs.items()}


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"\nStitching {TOKENS:,} tokens of 48 layers, 8 of 128 experts\n")
    print("| a turn's rows come as | routes read | turns | us per token | against 10 turns | copies per row |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    ratios = {}
    sources: dict[str, Callable[[Routes], bytes | Routes]] = {
        'wire, codec="sets"': lambda rows: wire.encode(rows, codec="sets"),
        "rows in memory": lambda rows: rows,
    }
    for source, make in sources.items():
        for read in (False, True):
            best = measure(make, read)
            ratios[source, read] = best[100][0] / best[10][0]
            for turns, (seconds, copies) in best.items():
                when = "after every turn" if read else "at the end"
                ratio = seconds / best[10][0]
                print(f"| {source} | {when} | {turns} | {seconds / TOKENS * 1e6:.3f} | {ratio:.2f}x | {copies:.2f} |")
    ratio = ratios['wire, codec="sets"', False]
    verdict = "ok" if ratio <= LIMIT else "MISSED"
    print(f"\n100 turns cost {ratio:.2f}x the time per token of 10 (limit {LIMIT}x): {verdict}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
