"""Turn the samples of a step into the input of each rank: mini-batches, packed bins, and the rank's rows.

The first rank holds the rollouts. It packs each mini-batch into bins, assigns the bins to the replicas in turn, and
sends every rank one message with its bins. A bin contains the tokens of all its slots, which a loss over sequences
needs and which take a few bytes per slot, and the rows of this rank's slots: in the wire encoding, or, if the rows lie
in a store, as the spans of their sources. Such a source travels beside the messages, by a `Post`, and each rank reads
its own rows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from router_replay import wire
from router_replay.batch import Batch, LocalBatch, RowSpans, Sample, Span, pack
from router_replay.errors import TrainError
from router_replay.rl.processes.ranks import Ranks
from router_replay.route_source import RouteSource

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


class Post(Protocol):
    """Bring the sources of rows to the ranks that read them."""

    def send(self, sources: Sequence[Sequence[RouteSource]]) -> None:
        """Send every rank its sources. Only the first rank calls it."""
        ...

    def receive(self, rank: int) -> Sequence[RouteSource]:
        """Return the sources that were sent to `rank` last."""
        ...


def deliver(plans: list[list[MiniBatch]] | None, ranks: Ranks, post: Post | None = None) -> list[MiniBatch]:
    """Send each rank its mini-batches and return those of this rank. Only the first rank passes plans.

    `post` is needed if rows lie in a store.
    """
    if plans is None:
        return decode(ranks.scatter(None), lambda: _there(post).receive(ranks.rank))
    sources: list[list[RouteSource]] = [[] for _ in plans]
    messages = [encode(mine, sources[rank]) if rank else b"" for rank, mine in enumerate(plans)]  # it keeps its own
    if any(sources):
        _there(post).send(sources)  # before the messages, so that no rank looks for its sources too early
    ranks.scatter(messages)
    return plans[0]


def _there(post: Post | None) -> Post:
    if post is None:
        raise TrainError("samples whose rows lie in a store can be sent to other ranks only with a post")
    return post


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
    routes: memoryview | list[tuple[int, int, int]] | None  # rows, or spans: number of the source, first, last


PADDING = -1  # in place of the number of a source


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


def encode(minis: Sequence[MiniBatch], sources: list[RouteSource] | None = None) -> bytearray:
    """Encode the mini-batches of one rank as one message.

    The sources of rows that lie in a store are added to `sources`, each once. The message refers to them by number.
    """
    numbers = _Numbers([] if sources is None else sources)
    sent = [
        _Mini([_sent(local, numbers) for local in mini.micro], mini.tokens, mini.sequences, mini.version)
        for mini in minis
    ]
    message = bytearray()
    msgspec.msgpack.Encoder().encode_into(sent, message)
    return message


def decode(message: bytes, sources: Callable[[], Sequence[RouteSource]] = tuple) -> list[MiniBatch]:
    """Decode the mini-batches of a message. Their arrays and rows are views of it.

    `sources` returns those that `encode` added; it is called if the message refers to one.
    """
    sent = msgspec.msgpack.decode(message, type=list[_Mini])
    stored = any(isinstance(micro.routes, list) for mini in sent for micro in mini.micro)
    found = sources() if stored else ()
    return [
        MiniBatch(tuple(_received(micro, found) for micro in mini.micro), mini.tokens, mini.sequences, mini.version)
        for mini in sent
    ]


class _Numbers:
    """Number the sources of a message in the order in which they appear."""

    def __init__(self, sources: list[RouteSource]) -> None:
        self._sources = sources
        self._known = {id(source): number for number, source in enumerate(sources)}

    def of(self, source: RouteSource | None) -> int:
        if source is None:
            return PADDING
        if id(source) not in self._known:
            self._known[id(source)] = len(self._sources)
            self._sources.append(source)
        return self._known[id(source)]


def _sent(local: LocalBatch, numbers: _Numbers) -> _Micro:
    arrays = {name: memoryview(getattr(local.whole, name).astype(dtype).tobytes()) for name, dtype in ARRAYS.items()}
    rows: Any = None
    if isinstance(local.routes, RowSpans) and any(span.source is not None for span in local.routes.spans):
        rows = [(numbers.of(span.source), span.first, span.last) for span in local.routes.spans]
    elif local.routes is not None:
        rows = memoryview(wire.encode(local.routes.read(), codec="dense"))
    return _Micro(**arrays, slots=memoryview(local.slots.astype("<i8").tobytes()), routes=rows)


def _received(micro: _Micro, sources: Sequence[RouteSource]) -> LocalBatch:
    arrays: dict[str, Any] = {name: np.frombuffer(getattr(micro, name), dtype) for name, dtype in ARRAYS.items()}
    whole = Batch(**arrays, routes=None, slots=np.arange(len(arrays["token_ids"])))
    rows: Any = None
    if isinstance(micro.routes, list):
        spans = [
            Span(None if number == PADDING else sources[number], first, last) for number, first, last in micro.routes
        ]
        rows = RowSpans(sources[0].spec, spans)
    elif micro.routes is not None:  # the sender is this package, and its rows were checked where they entered
        rows = wire.decode(micro.routes, check_rows=False)
    return LocalBatch(whole, np.frombuffer(micro.slots, "<i8"), rows)
