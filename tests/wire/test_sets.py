"""Codec `sets`: at the bound, sorted, and no rank that stands for no set."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router_replay import Routes, kernel, wire
from router_replay.errors import WireError
from tests.wire.blobs import patched, random_routes, spec_of


@pytest.mark.parametrize(("experts", "k", "layers"), [(128, 8, 48), (256, 8, 58), (384, 8, 60), (512, 22, 40)])
def test_size_is_at_the_bound(experts: int, k: int, layers: int) -> None:
    spec = spec_of(experts, k, layers)
    routes = random_routes(50, spec)
    blob = wire.encode(routes)
    bound = 50 * layers * math.log2(math.comb(experts, k)) / 8
    header = wire.read_header(blob).payload_offset + 8
    assert len(blob) <= 1.02 * bound + header
    assert header <= 64 + 8 + 4 * layers + 15 + 8


def test_only_captured_rows_are_paid_for() -> None:
    spec = spec_of(128, 8, 48)
    full = random_routes(100, spec)
    mask = np.arange(100) % 10 == 0
    holey = Routes(full.ids, spec, captured=mask)
    blob = wire.encode(holey)
    assert wire.read_header(blob).payload_length == 10 * 246
    back = wire.decode(blob)
    np.testing.assert_array_equal(back.captured, mask)
    np.testing.assert_array_equal(back.ids[mask], np.sort(full.ids[mask], axis=-1))
    assert not back.ids[~mask].any()


def test_slot_order_does_not_change_the_bytes() -> None:
    routes = random_routes(20, spec_of(128, 8))
    turned = Routes(routes.ids[..., ::-1], routes.spec)
    assert wire.encode(routes) == wire.encode(turned)
    assert wire.encode(routes, "dense") != wire.encode(turned, "dense")


def test_ordered_is_refused_both_ways() -> None:
    routes = random_routes(3, spec_of(8, 2, ordered=True))
    with pytest.raises(WireError, match="codec='dense'"):
        wire.encode(routes)
    blob = wire.encode(Routes(routes.ids, spec_of(8, 2)))
    with pytest.raises(WireError, match="ordered"):
        wire.decode(patched(blob, 11, bytes([blob[11] | 1])))


def test_forged_rank_names_the_place() -> None:
    spec = spec_of(8, 2, layers=3)  # ranks below 28, 5 bits
    blob = wire.encode(Routes(np.tile([0, 1], (8, 3, 1)), spec))  # all ranks 0: 24 * 5 bits = 15 bytes
    forgery = (28 << 5 * (4 * 3 + 2)).to_bytes(15, "little")
    with pytest.raises(WireError, match=r"captured row 4, layer 2: .* C\(8, 2\)"):
        wire.decode(patched(blob, -8 - 15, forgery))
    highest = (27 << 5 * (4 * 3 + 2)).to_bytes(15, "little")
    assert wire.decode(patched(blob, -8 - 15, highest)).ids[4, 2].tolist() == [6, 7]


def test_forged_padding_bits() -> None:
    blob = wire.encode(Routes([[[0, 1]]], spec_of(8, 2, layers=1)))
    with pytest.raises(WireError, match="must be zero"):
        wire.decode(patched(blob, -9, b"\x20"))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads(threads: int) -> None:
    routes = random_routes(301, spec_of(384, 8, 7))
    blob = wire.encode(routes, threads=threads)
    assert blob == wire.encode(routes)
    assert wire.decode(blob, threads=threads).same_sets(routes)


@pytest.mark.parametrize(("experts", "k"), [(128, 8), (512, 22), (8, 8), (512, 40)])
def test_numpy_kernel_writes_the_same_blob(experts: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = random_routes(9, spec_of(experts, k))
    blob = wire.encode(routes)
    monkeypatch.setattr(kernel, "_compiled", None)
    assert wire.encode(routes) == blob
    assert wire.decode(blob).same_sets(routes)
