"""Every sample reaches exactly one replica, every rank gets its own rows and no others."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterSpec, Routes, Sample, wire
from router_replay.batch import Batch, RowSpans
from router_replay.errors import TrainError, WireError
from router_replay.rl.policy import delivery
from router_replay.rl.processes.ranks import Ranks
from router_replay.route_source import RouteSource
from tests.batch.test_spans import InBlob

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(0, 1))


def sample(number: int, length: int) -> Sample:
    rng = np.random.default_rng(number)
    ids = np.argsort(rng.random((length, 2, 16)), axis=-1)[..., :2]
    mask = np.arange(length) > 0
    tokens = np.full(length, number) * 100 + np.arange(length)
    return Sample(tokens, np.zeros(length), mask, Routes(ids, SPEC, captured=np.arange(length) < length - 1))


def ranks(rank: int, world: int, ulysses: int) -> Ranks:
    return Ranks(rank, world, ulysses, torch.device("cpu"))


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12),
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]),
    max_tokens=st.integers(12, 40),
    alone=st.booleans(),
)
def test_what_is_dealt_out_is_everything_once(
    lengths: list[int], shape: tuple[int, int], max_tokens: int, alone: bool
) -> None:
    world, ulysses = shape
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    plans = delivery.plan([samples], ranks(0, world, ulysses), max_tokens, "raise", alone)
    assert len({len(plan[0].micro) for plan in plans}) == 1  # FSDP2: as many passes on every rank
    seen: list[int] = []
    for [mini] in plans:
        assert (mini.tokens, mini.sequences) == (sum(lengths) - len(lengths), len(lengths))
        for micro in mini.micro:
            assert micro.routes is not None
            assert len(micro.routes) == len(micro) == len(micro.whole) // ulysses
            for slot, token in enumerate(micro.whole.token_ids[micro.slots].tolist()):
                if micro.whole.sample_ids[micro.slots][slot] < 0:
                    assert not micro.routes.captured[slot]
                    continue
                number, position = divmod(token, 100)
                expected = samples[number].routes
                assert expected is not None
                assert micro.routes.captured[slot] == expected.captured[position]
                if expected.captured[position]:
                    assert np.array_equal(micro.routes.ids[slot], expected.ids[position])
            if alone:
                assert len(set(micro.whole.token_ids[micro.whole.sample_ids >= 0].tolist())) <= max(lengths)
            seen += micro.whole.token_ids[micro.slots][micro.label_mask].tolist()
    everything = [token for one in samples for token in one.token_ids[:-1].tolist()]
    assert sorted(seen) == sorted(everything)


def test_one_at_a_time_gives_every_sample_a_pass_of_its_own() -> None:
    samples = [sample(number, 4) for number in range(5)]
    [[mini]] = delivery.plan([samples], ranks(0, 1, 1), 64, "raise", True)
    assert [len(micro.whole) for micro in mini.micro] == [4] * 5


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12),
    shape=st.sampled_from([(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (8, 2, 2)]),
    max_tokens=st.integers(12, 40),
)
def test_blocks_of_rows_hold_every_sample_once_and_are_alike(
    lengths: list[int], shape: tuple[int, int, int], max_tokens: int
) -> None:
    world, tensor, pipeline = shape
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    here = Ranks(0, world, 1, torch.device("cpu"), tensor=tensor, pipeline=pipeline)
    plans = delivery.plan([samples], here, max_tokens, "raise", row_multiple=tensor)
    shapes = {tuple(micro.whole.cu_seqlens.tolist()) for [mini] in plans for micro in mini.micro}
    assert len(shapes) == 1
    [ends] = shapes
    assert ends[-1] <= max_tokens
    assert len({end - start for start, end in itertools.pairwise(ends)}) == 1
    assert ends[1] % tensor == 0
    replicas: dict[int, list[tuple[int, ...]]] = {}
    for rank, [mini] in enumerate(plans):
        assert (mini.tokens, mini.sequences) == (sum(lengths) - len(lengths), len(lengths))
        assert len(mini.micro) == len(plans[0][0].micro)
        seen = [tuple(micro.whole.token_ids[micro.label_mask].tolist()) for micro in mini.micro]
        replica, _ = here.place_of(rank)
        assert replicas.setdefault(replica, seen) == seen  # all ranks of a replica have the same tokens
    everything = [token for one in samples for token in one.token_ids[:-1].tolist()]
    dealt = [token for seen in replicas.values() for tokens in seen for token in tokens]
    assert sorted(dealt) == sorted(everything)


def test_the_ranks_of_a_replica_stand_as_megatron_places_them() -> None:
    here = Ranks(0, 8, 1, torch.device("cpu"), tensor=2, pipeline=2)  # two replicas: ranks 0 1 4 5 and 2 3 6 7
    assert [here.place_of(rank) for rank in range(8)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip


def test_episodes_are_dealt_whole_and_the_same_seed_deals_alike() -> None:
    samples = [sample(number, 4) for number in range(8)]
    episodes = [0, 0, 1, 2, 3, 3, 4, 5]
    parts = delivery.split(samples, episodes, 3, (0, 1))
    again = delivery.split(samples, episodes, 3, (0, 1))
    other = delivery.split(samples, episodes, 3, (0, 2))
    tokens = [[int(one.token_ids[0]) // 100 for one in part] for part in parts]
    assert sorted(number for part in tokens for number in part) == list(range(8))
    assert all({0, 1} <= set(part) or not {0, 1} & set(part) for part in tokens)
    assert tokens == [[int(one.token_ids[0]) // 100 for one in part] for part in again]
    assert tokens != [[int(one.token_ids[0]) // 100 for one in part] for part in other]
    assert {len({episodes[number] for number in part}) for part in tokens} == {2}


@pytest.mark.parametrize("with_routes", [True, False])
def test_what_is_sent_is_what_was_planned(with_routes: bool) -> None:
    samples = [sample(number, 4 + number) for number in range(3)]
    if not with_routes:
        samples = [Sample(one.token_ids, one.logprobs, one.loss_mask, None) for one in samples]
    plans = delivery.plan([samples, samples[:2]], ranks(0, 2, 2), 8, "raise")
    for minis in plans:
        back = delivery.decode(bytes(delivery.encode(minis)))
        assert [(one.tokens, one.sequences) for one in back] == [(one.tokens, one.sequences) for one in minis]
        for sent, got in zip(minis, back, strict=True):
            for before, after in zip(sent.micro, got.micro, strict=True):
                for field in dataclasses.fields(Batch):
                    assert_same(getattr(before.whole, field.name), getattr(after.whole, field.name))
                assert np.array_equal(after.slots, before.slots)
                assert (after.routes is None) == (not with_routes)
                assert after.routes == before.routes


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, np.ndarray):
        assert after.dtype == before.dtype
        assert np.array_equal(after, before)
    else:
        assert after == before


def test_a_message_of_another_shape_or_with_damaged_rows_is_refused() -> None:
    [[mini]] = delivery.plan([[sample(0, 4)]], ranks(0, 1, 1), 64, "raise")
    routes = mini.micro[0].routes
    assert routes is not None
    message, blob = delivery.encode([mini]), wire.encode(routes, codec="dense")
    with pytest.raises(msgspec.ValidationError, match="Expected `array`"):
        delivery.decode(msgspec.msgpack.encode({"micro": []}))
    message[message.index(blob) + len(blob) - 9] ^= 1  # the last byte before the checksum
    with pytest.raises(WireError, match="checksum"):
        delivery.decode(bytes(message))


@pytest.mark.parametrize("lengths", [[4, 5, 6], [1]])
def test_rows_in_a_store_stay_there_until_their_rank_reads_them(lengths: list[int]) -> None:
    """With one token, the pieces of three ranks are padding only, which has no source."""
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    blobs = [InBlob(one.routes.read()) for one in samples if one.routes is not None]
    stored = [dataclasses.replace(one, routes=blob) for one, blob in zip(samples, blobs, strict=True)]
    expected, plans = (delivery.plan([given], ranks(0, 4, 4), 8, "live") for given in (samples, stored))
    received = []
    for minis in plans:
        sources: list[RouteSource] = []
        received.append(delivery.decode(bytes(delivery.encode(minis, sources)), lambda sent=sources: sent))  # type: ignore[misc]
        assert len(sources) == len({id(source) for source in sources})
    assert not any(blob.seen for blob in blobs)
    for theirs, mine in zip(expected, received, strict=True):
        for before, after in zip(theirs[0].micro, mine[0].micro, strict=True):
            assert after.routes.read() == before.routes  # type: ignore[union-attr]
    assert any(isinstance(micro.routes, RowSpans) for [mini] in received for micro in mini.micro)


def test_rows_in_a_store_need_a_post() -> None:
    one = sample(0, 4)
    assert one.routes is not None
    stored = dataclasses.replace(one, routes=InBlob(one.routes.read()))
    with pytest.raises(TrainError, match="only with a post"):
        delivery.deliver(delivery.plan([[stored]], ranks(0, 2, 2), 8, "raise"), ranks(0, 2, 2))
