"""Turn the samples of a step into the input of each rank: mini-batches, packed bins, and the rank's rows.

The first rank holds the rollouts. It packs each mini-batch into bins, assigns the bins to the replicas in turn, and
sends every rank one message with its bins. A bin contains the tokens of all its slots, which a loss over sequences
needs and which take a few bytes per slot, and the rows of this rank's slots in the wire encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from router_replay import wire
from router_replay.batch import Batch, LocalBatch, Sample, pack
from router_replay.rl.processes.ranks import Ranks

WHOLE_SEQUENCES: Literal["contiguous"] = "contiguous"  # how Ulysses cuts a bin


@dataclasses.dataclass(frozen=True, eq=False)
class MiniBatch:
    """Hold the data of one optimizer step. All ranks have equally many micro-batches.

    Sums are divided by `tokens` or `sequences`. `version` is the policy version that the step updates.
    """

    micro: tuple[LocalBatch, ...]
    tokens: int
    sequences: int
    version: int = 0


def split(samples: Sequence[Sample], episodes: Sequence[int], parts: int, seed: Sequence[int]) -> list[list[Sample]]:
    """Distribute whole episodes over mini-batches in an order drawn from `seed`; an episode is never split."""
    numbers = np.unique(np.asarray(episodes))
    shuffled = np.random.default_rng(np.random.SeedSequence(seed)).permutation(numbers)
    part_of = {int(number): position * parts // len(shuffled) for position, number in enumerate(shuffled)}
    dealt: list[list[Sample]] = [[] for _ in range(parts)]
    for sample, episode in zip(samples, episodes, strict=True):
        dealt[part_of[int(episode)]].append(sample)
    return dealt


def plan(
    parts: Sequence[Sequence[Sample]],
    ranks: Ranks,
    max_tokens: int,
    on_missing: Literal["raise", "live"],
    one_at_a_time: bool = False,
    row_multiple: int | None = None,
    *,
    version: int = 0,
) -> list[list[MiniBatch]]:
    """Return the mini-batches of every rank, for an update of this policy `version`.

    `one_at_a_time` is for models that cannot keep packed sequences apart. `row_multiple` is for models that take blocks
    of rows: each row is one sequence, padded to the longest of the mini-batch and to a multiple of this number, and all
    blocks of a mini-batch have equally many rows.
    """
    plans: list[list[MiniBatch]] = [[] for _ in range(ranks.world)]
    for samples in parts:
        if row_multiple is not None:
            batches = [_blocks_of_rows(samples, max_tokens, row_multiple, ranks.replicas, on_missing)]
        else:
            shares = [[sample] for sample in samples] if one_at_a_time else [samples]
            batches = [pack(share, max_tokens, ranks.ulysses, on_missing=on_missing) for share in shares]
        tokens = sum(int(batch.label_mask.sum()) for batch in batches)
        bins = [one for batch in batches for one in batch.bins()]
        while len(bins) % ranks.replicas:
            bins.append(_without_loss(bins[-1]))  # FSDP2 needs equally many passes on every rank
        shared = [whole.split(ranks.ulysses, WHOLE_SEQUENCES) for whole in bins]
        for rank, mine in enumerate(plans):
            replica, piece = ranks.place_of(rank)
            micro = tuple(pieces[piece % ranks.ulysses] for pieces in shared[replica :: ranks.replicas])
            mine.append(MiniBatch(micro, tokens, len(samples), version))
    return plans


def _blocks_of_rows(
    samples: Sequence[Sample], max_tokens: int, multiple: int, replicas: int, on_missing: Literal["raise", "live"]
) -> Batch:
    """Pack each sample into a row of its own; every bin has equally many rows, and every replica as many bins.

    Rows that are left over hold a sample again, without loss.
    """
    length = max(len(sample) for sample in samples)
    length += -length % multiple
    bins = -(-len(samples) // max(1, max_tokens // length))
    bins += -bins % replicas
    rows = -(-len(samples) // bins)
    left_over = bins * rows - len(samples)
    again = dataclasses.replace(samples[0], loss_mask=np.zeros(len(samples[0]), bool))
    return pack([*samples, *[again] * left_over], min(max_tokens, rows * length), length, on_missing=on_missing)


def deliver(plans: list[list[MiniBatch]] | None, ranks: Ranks) -> list[MiniBatch]:
    """Send each rank its mini-batches and return those of this rank. Only the first rank passes plans."""
    if plans is None:
        return decode(ranks.scatter(None))
    ranks.scatter([encode(mine) if rank else b"" for rank, mine in enumerate(plans)])  # the first keeps its own
    return plans[0]


def _without_loss(whole: Batch) -> Batch:
    nothing = np.zeros(len(whole), bool)
    return dataclasses.replace(whole, loss_mask=nothing, label_mask=nothing)


# -- the message --------------------------------------------------------------------------------


class _Micro(msgspec.Struct, frozen=True, array_like=True):
    """Encode a LocalBatch. Arrays are little-endian bytes of the types in ARRAYS."""

    token_ids: memoryview
    position_ids: memoryview
    sample_ids: memoryview
    loss_mask: memoryview
    logprobs: memoryview
    advantages: memoryview
    versions: memoryview
    labels: memoryview
    label_mask: memoryview
    label_logprobs: memoryview
    label_advantages: memoryview
    label_versions: memoryview
    cu_seqlens: memoryview
    bin_ends: memoryview
    slots: memoryview
    routes: memoryview | None


class _Mini(msgspec.Struct, frozen=True, array_like=True):
    micro: list[_Micro]
    tokens: int
    sequences: int
    version: int


ARRAYS = {
    "token_ids": "<i8", "position_ids": "<i8", "sample_ids": "<i8", "loss_mask": "|b1", "logprobs": "<f4",
    "advantages": "<f4", "versions": "<i8", "labels": "<i8", "label_mask": "|b1", "label_logprobs": "<f4",
    "label_advantages": "<f4", "label_versions": "<i8", "cu_seqlens": "<i4", "bin_ends": "<i8",
}  # fmt: skip


def encode(minis: Sequence[MiniBatch]) -> bytearray:
    """Encode the mini-batches of one rank as one message."""
    sent = [_Mini([_sent(local) for local in mini.micro], mini.tokens, mini.sequences, mini.version) for mini in minis]
    message = bytearray()
    msgspec.msgpack.Encoder().encode_into(sent, message)
    return message


def decode(message: bytes) -> list[MiniBatch]:
    """Decode the mini-batches of a message. Their arrays and rows are views of it."""
    sent = msgspec.msgpack.decode(message, type=list[_Mini])
    return [
        MiniBatch(tuple(_received(micro) for micro in mini.micro), mini.tokens, mini.sequences, mini.version)
        for mini in sent
    ]


def _sent(local: LocalBatch) -> _Micro:
    arrays = {name: memoryview(getattr(local.whole, name).astype(dtype).tobytes()) for name, dtype in ARRAYS.items()}
    rows = None if local.routes is None else memoryview(wire.encode(local.routes, codec="dense"))
    return _Micro(**arrays, slots=memoryview(local.slots.astype("<i8").tobytes()), routes=rows)


def _received(micro: _Micro) -> LocalBatch:
    arrays: dict[str, Any] = {name: np.frombuffer(getattr(micro, name), dtype) for name, dtype in ARRAYS.items()}
    whole = Batch(**arrays, routes=None, slots=np.arange(len(arrays["token_ids"])))
    # The sender is this package, and its rows were checked where they entered.
    rows = None if micro.routes is None else wire.decode(micro.routes, check_rows=False)
    return LocalBatch(whole, np.frombuffer(micro.slots, "<i8"), rows)
