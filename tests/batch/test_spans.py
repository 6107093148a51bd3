"""Rows that lie in a store: they are laid out as other rows, and a rank reads its own rows and layers, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterSpec, Routes, Sample, pack, wire
from router_replay.batch import RowSpans, Span
from router_replay.batch.megatron import MegatronLayout
from router_replay.errors import BatchError
from router_replay.route_source import RouteSource
from router_replay.runs import Runs
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(0, 1, 3))


class InBlob(RouteSource):
    """Routes as a seekable blob, and a note of what was read of it."""

    def __init__(self, routes: Routes) -> None:
        self._reader = wire.Reader(wire.encode(routes, codec="dense", seekable=True))
        self.seen: list[tuple[int, int, Sequence[int] | None]] = []

    @property
    def spec(self) -> RouterSpec:
        return self._reader.header.spec

    @property
    def captured_runs(self) -> Runs:
        return self._reader.header.captured

    def read(self, first: int = 0, last: int | None = None, layers: Sequence[int] | None = None) -> Routes:
        self.seen.append((first, len(self) if last is None else last, layers))
        return self._reader.read(first, last, layers)


def in_memory(lengths: list[int]) -> list[Sample]:
    """The last token of every sequence has no row, as from an engine."""
    made = []
    for number, length in enumerate(lengths):
        routes = Routes(random_routes(length, SPEC, number).ids, SPEC, np.arange(length) < length - 1, versions=number)
        made.append(Sample(np.arange(2, length + 2), np.zeros(length), np.arange(length) > 0, routes))
    return made


def in_blobs(samples: list[Sample]) -> tuple[list[Sample], list[InBlob]]:
    blobs = [InBlob(one.routes.read()) for one in samples if one.routes is not None]
    stored = [
        Sample(one.token_ids, one.logprobs, one.loss_mask, blob) for one, blob in zip(samples, blobs, strict=True)
    ]
    return stored, blobs


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=8),
    size=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["contiguous", "zigzag"]),
)
def test_every_rank_reads_the_rows_that_it_would_be_sent_and_no_others(
    lengths: list[int], size: int, kind: Literal["contiguous", "zigzag"]
) -> None:
    samples = in_memory(lengths)
    stored, blobs = in_blobs(samples)
    expected, batch = pack(samples, 64, 2 * size), pack(stored, 64, 2 * size)
    assert isinstance(batch.routes, RowSpans)
    assert batch.routes.captured.tolist() == expected.routes.captured.tolist()  # type: ignore[union-attr]
    shares = [whole.split(size, kind) for whole in batch.bins()]
    assert not any(blob.seen for blob in blobs)  # nothing is read where it is laid out
    for whole, parts in zip(expected.bins(), shares, strict=True):
        for wanted, local in zip(whole.split(size, kind), parts, strict=True):
            assert local.routes.read() == wanted.routes  # type: ignore[union-attr]
            assert wanted.routes is not None
            assert np.array_equal(local.to_torch().routes.captured.numpy(), wanted.routes.captured)  # type: ignore[union-attr]
    for blob, length in zip(blobs, lengths, strict=True):
        read = np.concatenate([np.arange(first, last) for first, last, _ in blob.seen])
        assert np.bincount(read, minlength=length).tolist() == [2] * length  # by read() and by to_torch()


@given(
    sequences=st.integers(1, 3), parts=st.sampled_from([1, 2]), context=st.sampled_from([1, 2]), layers=st.booleans()
)
def test_a_megatron_rank_reads_its_own_positions_and_layers(
    sequences: int, parts: int, context: int, layers: bool
) -> None:
    length = 8 * parts * context
    samples = in_memory([length] * sequences)
    stored, blobs = in_blobs(samples)
    expected, batch = pack(samples, sequences * length), pack(stored, sequences * length)
    own = (1, 3) if layers else SPEC.layers
    for part in range(parts):
        for other in range(context):
            layout = MegatronLayout(own, part, parts, other, context)
            share = layout.share(batch.routes, sequences, boundaries=batch.cu_seqlens)  # type: ignore[arg-type]
            assert share.rows == layout.share(expected.routes, sequences, boundaries=batch.cu_seqlens).rows  # type: ignore[arg-type]
    for blob in blobs:
        assert {tuple(wanted or ()) for _, _, wanted in blob.seen} == {own}
        read = np.concatenate([np.arange(first, last) for first, last, _ in blob.seen])
        assert sorted(read.tolist()) == list(range(length))
        assert len(blob.seen) <= 2 * parts * context  # neighbours are read together


def test_stored_and_other_samples_share_a_batch() -> None:
    samples = in_memory([5, 7, 3])
    stored, _ = in_blobs(samples)
    expected, mixed = pack(samples, 16), pack([samples[0], stored[1], samples[2]], 16)
    assert isinstance(mixed.routes, RowSpans)
    assert mixed.routes.read() == expected.routes


def test_rows_are_cut_and_chosen_like_routes() -> None:
    routes = random_routes(10, SPEC)
    spans = RowSpans(SPEC, [Span(InBlob(routes), 2, 8), Span(None, 0, 2), Span(routes, 0, 1)])
    whole = Routes.concat([routes[2:8], Routes.missing(2, SPEC), routes[:1]])
    assert len(spans) == 9
    assert spans.read() == whole
    assert spans[1:7].read(1, 3) == whole[2:4]
    assert spans[4:4].read() == whole[:0]
    assert spans.take(np.array([8, 0, 1, 5])).read() == whole.take([8, 0, 1, 5])
    assert spans.read(layers=(1,)) == whole.select_layers((1,))
    assert (spans.all_captured, spans.any_captured, spans.first_missing) == (False, True, 6)
    with pytest.raises(BatchError, match="only by a slice with step 1"):
        spans[::2]


def test_a_missing_row_of_a_stored_sample_is_refused_before_it_is_read() -> None:
    [sample] = in_memory([6])
    assert sample.routes is not None
    gap = Routes(sample.routes.read().ids, SPEC, captured=[True, True, False, True, True, False])
    blob = InBlob(gap)
    with pytest.raises(BatchError, match="row 2 predicts token 3, which bears loss, and was not captured"):
        pack([Sample(sample.token_ids, sample.logprobs, sample.loss_mask, blob)], 16)
    assert not blob.seen
