"""LocalBatch: the tokens of a bin and the rows of one rank, without a copy until the device, and then with one."""

from __future__ import annotations

import gc
import weakref
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterReplay, RouterSpec, Routes, Sample, logprobs, pack
from router_replay.batch import NO_LABEL, Batch, LocalBatch
from router_replay.batch.tensors import LocalTensors
from router_replay.errors import BatchError, ReplayError
from router_replay.replay.state import Plan
from tests.makers import random_routes
from tests.replay import tiny

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(0, 1))


def packed(lengths: list[int], multiple: int = 1, spec: RouterSpec = SPEC) -> Batch:
    """The last token of every sequence has no row, as from an engine."""
    samples = []
    for number, length in enumerate(lengths):
        ids = random_routes(length, spec, seed=number).ids
        routes = Routes(ids, spec, captured=np.arange(length) < length - 1)
        tokens = np.arange(2, length + 2)
        samples.append(Sample(tokens, np.zeros(length), np.arange(length) > 0, routes, advantages=float(number)))
    return pack(samples, 64, multiple)


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=8),
    size=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["contiguous", "zigzag"]),
)
def test_split_gives_each_rank_what_shard_gives_it(
    lengths: list[int], size: int, kind: Literal["contiguous", "zigzag"]
) -> None:
    batch = packed(lengths, multiple=2 * size)
    for whole in batch.bins():
        parts = whole.split(size, kind)
        assert len(parts) == size
        for rank, local in enumerate(parts):
            shard = whole.shard(rank, size, kind)
            assert local.routes == shard.routes
            assert np.array_equal(local.labels, shard.labels)
            assert np.array_equal(local.label_mask, shard.label_mask)
            tensors = local.to_torch()
            assert len(tensors) == len(local) == len(shard)
            for name in ("token_ids", "position_ids", "labels", "label_mask"):
                assert np.array_equal(getattr(tensors, name).numpy(), getattr(shard, name))
            assert np.array_equal(tensors.whole("label_advantages").numpy(), whole.label_advantages)


def test_bins_and_split_copy_no_row() -> None:
    batch = packed([9, 60, 30])
    assert batch.routes is not None
    bins = list(batch.bins())
    assert len(bins) == 2
    for whole in bins:
        for local in whole.split(3):
            assert local.routes is not None
            assert np.shares_memory(local.routes.ids, batch.routes.ids)
            assert np.shares_memory(local.whole.token_ids, batch.token_ids)


def test_a_row_is_copied_to_the_device_once_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench.train prints this count: pack lays the rows out (1), the first pass puts them on the device (2)."""
    model = tiny.make("qwen3_moe").model
    replayer, reference = RouterReplay(model), RouterReplay(tiny.make("qwen3_moe").model)
    [local] = packed([5, 7], spec=replayer.spec).split(1)
    read: set[int] = set()
    column = Plan.column
    monkeypatch.setattr(Plan, "column", lambda plan, index: read.add(plan.ids_TLK.data_ptr()) or column(plan, index))
    for one in (replayer, replayer, reference):
        with one.replay(local):
            logprobs(one._model, local).sum().backward()
    tensors = local.to_torch("cpu")
    assert tensors.routes is not None
    assert read == {tensors.routes.ids.data_ptr()}


def test_tensors_are_kept_and_copied_only_when_used() -> None:
    [local] = packed([5, 7]).split(1)
    tensors = local.to_torch(torch.device("cpu"))
    assert isinstance(tensors, LocalTensors)
    assert local.to_torch() is tensors
    assert tensors.whole("label_mask") is tensors.whole("label_mask")
    assert "routes" not in vars(tensors)
    assert tensors.routes is tensors.routes
    tensors.token_ids.zero_()
    assert local.whole.token_ids.any()


def test_a_batch_is_freed_when_nobody_holds_it() -> None:
    """A cycle would keep its tensors, and its references to rows in a store, until the garbage collector runs."""
    [local] = packed([5, 7]).split(1)
    assert local.to_torch().routes is not None
    batch = weakref.ref(local)
    gc.disable()
    try:
        del local
        assert batch() is None
    finally:
        gc.enable()


def test_live_rows_are_those_that_predict_something() -> None:
    """Padding and the last token of a sequence are routed live too, and are not missing to anybody."""
    replayer = RouterReplay(tiny.make("qwen3_moe").model)
    batch = packed([5, 7], multiple=8, spec=replayer.spec)
    assert (batch.labels == NO_LABEL).sum() == 6
    tensors = batch.to_torch()
    for given_, live in ((batch, 0), (tensors, 0), (batch.split(1)[0], 0), (batch.routes, 6), (tensors.routes, 6)):
        before = replayer.stats
        with replayer.replay(given_):
            replayer._model(input_ids=tensors.token_ids[None], position_ids=tensors.position_ids[None])
        assert set(replayer.stats.since(before).rows_live) == {live}
        assert set(replayer.stats.since(before).rows_replayed) == {10}
    idle = batch.sample_ids < 0  # a caller that knows its padding only
    before = replayer.stats
    with replayer.replay(batch.routes, idle=idle):
        replayer._model(input_ids=tensors.token_ids[None], position_ids=tensors.position_ids[None])
    assert set(replayer.stats.since(before).rows_live) == {2}
    with pytest.raises(ReplayError, match=r"idle must have one entry per row: expected \[16\], got \[3\]"):
        replayer.replay(batch.routes, idle=idle[:3]).__enter__()


def test_rows_that_do_not_fit_their_slots_are_refused() -> None:
    batch = packed([4])
    [local] = batch.split(1)
    with pytest.raises(BatchError, match="one row per slot: expected 4, got 3"):
        LocalBatch(local.whole, local.slots, local.routes[:3])
    with pytest.raises(BatchError, match=r"make a LocalBatch with Batch\.split"):
        LocalBatch(batch, local.slots, local.routes)
    with pytest.raises(BatchError, match=r"split\(\) needs the whole batch, got a shard"):
        batch.shard(0, 2).split(2)
