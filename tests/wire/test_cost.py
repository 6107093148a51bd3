"""A blob cannot cost more time than its size allows: work is counted before it is done."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterSpec, kernel, wire
from router_replay.errors import WireError
from router_replay.runs import Runs
from router_replay.wire import Header, envelope, limits, sets
from tests.wire.blobs import forged, random_routes, spec_of


def wide_blob(experts: int, k: int, sets: int) -> bytes:
    """A right blob of `sets` rows of one layer, all of rank 0, made without computing a set."""
    size = (sets * kernel.rank_bits(experts, k) + 7) // 8
    spec = RouterSpec(experts, k, (0,))
    header = Header(spec, "sets", sets, 0, Runs.constant(True, sets), None, None, size)
    return envelope.seal(header, bytes(size))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sets, slots, experts) of every unpacking that was begun; none is done."""
    begun: list[tuple[int, int, int]] = []

    def decode_sets(_: object, count: int, k: int, experts: int, dtype: np.dtype, __: int) -> np.ndarray:
        begun.append((count, k, experts))
        return np.broadcast_to(np.arange(k, dtype=dtype), (count, k))

    monkeypatch.setattr(kernel, "decode_sets", decode_sets)
    return begun


@pytest.mark.parametrize(("experts", "k", "sets"), [(65536, 10, 19_700), (65536, 32768, 42), (65536, 1000, 370)])
def test_342_kb_that_would_take_seconds_are_refused_unless_the_caller_names_the_model(
    experts: int, k: int, sets: int, counted: list
) -> None:
    blob = wide_blob(experts, k, sets)
    assert 330_000 < len(blob) < 350_000
    with pytest.raises(WireError, match=rf"unpacking {sets} sets .* takes about .* pass decode\(\.\.\., spec=\)"):
        wire.decode(blob)
    assert not counted
    assert len(wire.decode(blob, spec=RouterSpec(experts, k, (0,)))) == sets
    assert counted == [(sets, k, experts)]


@pytest.mark.parametrize(("experts", "k"), [(65536, 65530), (65536, 65534)])
def test_few_bytes_that_unpack_to_many_slots_are_refused(experts: int, k: int, counted: list) -> None:
    sets = limits.FREE_BYTES // (2 * k)  # all that the memory limit allows
    with pytest.raises(WireError, match=r"more than the limit of .* for a blob of this size"):
        wire.decode(wide_blob(experts, k, sets))
    assert not counted


@pytest.mark.parametrize(("experts", "k"), [(128, 8), (512, 22), (512, 40), (384, 8), (60, 4), (4, 4), (1, 1)])
def test_models_of_today_and_tomorrow_need_no_name(experts: int, k: int, counted: list) -> None:
    wire.decode(wide_blob(experts, k, 200_000))
    assert len(counted) == 1


def test_a_header_alone_does_not_make_the_reader_compute_a_long_binomial(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = forged(wide_blob(8, 2, 1), num_experts=65536, top_k=32768)
    monkeypatch.setattr(kernel, "rank_bits", pytest.fail)
    with pytest.raises(WireError, match=r"1 sets of 32768 of 65536 experts take 4095 bytes or more .* got 1"):
        wire.decode(blob)


@given(st.integers(1, 3000), st.data())
def test_the_quick_bound_of_a_ranks_width_is_a_bound(experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    width, bound = kernel.rank_bits(experts, k), kernel.least_rank_bits(experts, k)
    assert width * 0.4 - 3 <= bound <= width


def test_unpacking_may_take_as_many_steps_as_allowed_and_no_more() -> None:
    header = wire.read_header(wide_blob(128, 8, 100))
    steps = kernel.unranking_steps(100, 8, 128)
    sets.refuse_slow(header, steps)
    with pytest.raises(WireError, match=f"takes about {steps:,} steps, more than the limit of {steps - 1:,} "):
        sets.refuse_slow(header, steps - 1)


def test_every_layer_of_a_row_is_a_set_to_unpack() -> None:
    blob = wire.encode(random_routes(6, spec_of(128, 8, layers=4)))
    with pytest.raises(WireError, match="unpacking 24 sets of 8 of 128 experts"):
        sets.refuse_slow(wire.read_header(blob), 0)


def test_a_blob_unpacks_into_256_mib_or_64_times_its_size() -> None:
    assert limits.most_bytes(10, None) == 256 << 20
    assert limits.most_bytes(5 << 20, None) == 64 * (5 << 20)
    assert limits.most_bytes(10, 7) == 7


@pytest.mark.parametrize(("experts", "k"), [(256, 1), (2, 1), (8, 8), (1, 1), (65536, 1)])
def test_sets_of_whole_bytes_and_of_no_bits_are_read(experts: int, k: int) -> None:
    assert len(wire.decode(wide_blob(experts, k, 8))) == 8


def test_the_budget_of_steps_is_that_of_these_sets_exactly() -> None:
    spec = RouterSpec(512, 40, (2,))  # ranks too wide for the tables
    header: Any = types.SimpleNamespace(spec=spec, captured_rows=3)
    steps = kernel.unranking_steps(3, 40, 512)
    sets.refuse_slow(header, steps)
    with pytest.raises(WireError, match="unpacking 3 sets of 40 of 512 experts"):
        sets.refuse_slow(header, steps - 1)
