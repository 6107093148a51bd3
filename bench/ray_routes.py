"""Measure the bytes of routes that each rank reads when they lie in Ray's object store, for 1 to 8 ranks.

    python -m bench.ray_routes

The ranks only read: they get their mini-batches as trainer ranks do, by a message and references, and read the rows and
layers of their share. Two Ray actors do that in turn for all ranks, because bytes do not depend on who reads them.

The routes of a step stay the same while the number of ranks grows. In three divisions, data parallel ranks read other
trajectories, Ulysses ranks other pieces of each sequence, and the stages of a pipeline other layers. In each of them a
rank should read its part and little more: all ranks together at most 1.1 times the bytes of all blobs, so that the
bytes of one rank fall with their number. The exit status is 1 where that is missed.

Two things are read more than once, and are kept small here as in a real step. A piece reads whole blocks of 256 rows,
so Ulysses has long sequences. If the bins do not divide among the replicas, a bin is run again without loss, so the
bins of data parallel ranks are many.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch

from router_replay import RouterSpec, Routes, Sample, wire
from router_replay.batch.megatron import MegatronLayout
from router_replay.rl.cluster.driver import _connected
from router_replay.rl.cluster.routes import POST, PostActor, RayPost, StoredRoutes, keep
from router_replay.rl.config import load_config
from router_replay.rl.policy import delivery
from router_replay.rl.processes.ranks import Ranks
from router_replay.route_source import RouteSource
from router_replay.runs import Runs

SPEC = RouterSpec(num_experts=128, top_k=8, layers=tuple(range(48)))  # Qwen3-30B-A3B
LIMIT = 1.1
COUNTS = (1, 2, 4, 8)
ACTORS = 2


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step: its trajectories have up to `tokens` tokens, at least half of that, and go into bins."""

    trajectories: int
    tokens: int
    bin_tokens: int
    codec: str


STEPS = {
    "data": Step(64, 4096, 4096, "dense"),
    "ulysses": Step(8, 32_768, 32_768, "dense"),
    "pipeline": Step(64, 4096, 16_384, "sets"),
}


class Counted(RouteSource):
    """A stored trajectory that counts the bytes that are read of its blob."""

    def __init__(self, stored: StoredRoutes) -> None:
        self._stored, self.bytes = stored, 0

    @property
    def spec(self) -> RouterSpec:
        return self._stored.spec

    @property
    def captured_runs(self) -> Runs:
        return self._stored.captured_runs

    def read(self, first: int = 0, last: int | None = None, layers: Sequence[int] | None = None) -> Routes:
        reader = self._stored.open()
        rows = reader.read(first, last, layers, check_rows=False)
        self.bytes += reader.bytes_read
        return rows


@dataclasses.dataclass(frozen=True)
class Read:
    """What one rank moved: bytes of its message, bytes that it read of blobs, and the rows and layers that it has."""

    message: int
    blobs: int
    cells: int


class Reader:
    """Read what ranks read."""

    def read(self, rank: int, message: bytes, layers: tuple[int, ...]) -> Read:
        """Read the share of this rank: the rows of its mini-batches, in these `layers`."""
        counted = [Counted(one) for one in RayPost().receive(rank)]  # type: ignore[arg-type]
        cells = 0
        for mini in delivery.decode(message, lambda: counted):
            for micro in mini.micro:
                assert micro.routes is not None
                share = MegatronLayout(layers).share(micro.routes)
                cells += share.rows.ids.shape[0] * share.rows.ids.shape[1]
        return Read(len(message), sum(one.bytes for one in counted), cells)


def measure(samples: Sequence[Sample], division: str, count: int, readers: Sequence[Any]) -> list[Read]:
    """Let `count` ranks read a step of these samples, divided as `division` says."""
    shape = {"data": (1, 1), "ulysses": (count, 1), "pipeline": (1, count)}[division]
    ranks = Ranks(0, count, shape[0], torch.device("cpu"), pipeline=shape[1])
    plans = delivery.plan([samples], ranks, STEPS[division].bin_tokens, "live")
    sources: list[list[RouteSource]] = [[] for _ in plans]
    messages = [bytes(delivery.encode(mine, own)) for mine, own in zip(plans, sources, strict=True)]
    RayPost().send(sources)
    width = len(SPEC.layers) // count if division == "pipeline" else len(SPEC.layers)
    answers = []
    for rank, message in enumerate(messages):
        stage = rank if division == "pipeline" else 0
        answers.append(
            readers[rank % ACTORS].read.remote(rank, message, SPEC.layers[stage * width : (stage + 1) * width])
        )
    return ray.get(answers)


def stored(step: Step) -> tuple[list[Sample], int, int]:
    """Return the samples of a step, the bytes of their blobs, and those of the messages that would carry the rows."""
    rng, samples, blobs, raw = np.random.default_rng(0), [], 0, 0
    scores = rng.random((1024, len(SPEC.layers), SPEC.num_experts), np.float32)
    ids_TLK = np.argpartition(scores, SPEC.top_k, axis=-1)[..., : SPEC.top_k].astype(np.uint8)
    for length in rng.integers(step.tokens // 2, step.tokens, step.trajectories).tolist():
        routes = Routes(ids_TLK[rng.integers(0, len(ids_TLK), length)], SPEC)
        source = keep(routes, step.codec)
        blobs += len(ray.get(source.reference))
        raw += len(wire.encode(routes, codec="dense"))
        mask = np.ones(length, bool)
        samples.append(Sample(np.zeros(length, np.int64), np.zeros(length, np.float32), mask, source))
    return samples, blobs, raw


def main() -> int:
    """Print one table, and return 1 if ranks read more than their share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    missed, sent = False, []
    with _connected(load_config(None, ["cluster.kind=ray"])):
        post = ray.remote(PostActor).options(name=POST, num_cpus=0).remote()
        readers = [ray.remote(Reader).options(num_cpus=0).remote() for _ in range(ACTORS)]
        print("| division | codec | ranks | MB read by a rank, mean | most | of all blobs, all ranks | message, MB |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for division, step in STEPS.items():
            samples, blobs, raw = stored(step)
            for count in COUNTS:
                read = measure(samples, division, count, readers)
                together = sum(one.blobs for one in read) / blobs
                missed |= together > LIMIT
                mean, most, message = (
                    value / 1e6
                    for value in (
                        sum(one.blobs for one in read) / count,
                        max(one.blobs for one in read),
                        max(one.message for one in read),
                    )
                )
                print(
                    f"| {division} | {step.codec} | {count} | {mean:.2f} | {most:.2f} | {together:.3f}"
                    f"{'' if together <= LIMIT else ' MISSED'} | {message:.2f} |",
                    flush=True,
                )
            copies = max(COUNTS) if division == "pipeline" else 1
            sent.append(
                f"{division}: {blobs / 1e6:.1f} MB of blobs; without references the first rank would send "
                f"{copies * raw / 1e6:.1f} MB of rows to {max(COUNTS)} ranks"
            )
            del samples
        del post
    print("", *sent, sep="\n")
    print("\nThe bytes of a rank fall with the number of ranks, because each reads its own part.")
    print(f"All ranks together read at most {LIMIT} times the blobs: {'MISSED' if missed else 'ok'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
