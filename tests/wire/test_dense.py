"""Codec `dense`: a view on the blob, and no row that no router could have produced."""

from __future__ import annotations

import mmap
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from router_replay import Routes, wire
from router_replay.errors import WireError
from tests.wire.blobs import patched, random_routes, spec_of


@pytest.mark.parametrize("experts", [128, 384])
def test_decodes_as_an_aligned_read_only_view(experts: int) -> None:
    routes = random_routes(100, spec_of(experts, 8, 5))
    blob = wire.encode(routes, "dense")
    back = wire.decode(blob)
    assert np.shares_memory(back.ids, np.frombuffer(blob, np.uint8))
    assert back.ids.flags.aligned
    assert not back.ids.flags.writeable
    assert wire.read_header(blob).payload_offset % 16 == 0
    assert back == routes


def test_slot_order_is_kept_for_ordered_models() -> None:
    routes = random_routes(10, spec_of(16, 4, ordered=True))
    back = wire.decode(wire.encode(routes, "dense"))
    assert back.spec.ordered
    np.testing.assert_array_equal(back.ids, routes.ids)


@pytest.mark.parametrize(("experts", "k"), [(100, 8), (300, 8), (300, 22), (100, 6), (300, 3)])
@pytest.mark.parametrize("rows", [60, 2000])
def test_forged_rows_name_row_and_layer(experts: int, k: int, rows: int) -> None:
    """A right checksum over wrong rows, wherever they stand."""
    spec = spec_of(experts, k, layers=4)
    routes = random_routes(rows, spec)
    blob = wire.encode(routes, "dense")
    assert wire.decode(blob) == routes
    offset = wire.read_header(blob).payload_offset
    for row, column in ((0, 0), (31, 2), (rows // 2, 1), (rows - 1, 3)):
        at = offset + (row * 4 + column) * k * spec.dtype.itemsize
        repeated = np.array([7] * 2, spec.dtype).tobytes()
        outside = np.array([experts], spec.dtype).tobytes()
        for forgery in (repeated, outside):
            with pytest.raises(WireError, match=f"row {row}, layer {column}: expected {k} different experts"):
                wire.decode(patched(blob, at, forgery))


def test_without_the_row_check_the_checksum_still_holds() -> None:
    routes = random_routes(50, spec_of(128, 8, 3))
    blob = wire.encode(routes, "dense")
    assert wire.decode(blob, check_rows=False) == routes
    damaged = bytearray(blob)
    damaged[-20] ^= 1
    with pytest.raises(WireError, match="checksum"):
        wire.decode(damaged, check_rows=False)


def test_uncaptured_rows_are_zeros() -> None:
    spec = spec_of(128, 8, 3)
    full = random_routes(6, spec)
    mask = np.array([True, False, False, True, False, True])
    blob = wire.encode(Routes(full.ids, spec, captured=mask), "dense")
    other = Routes(np.where(mask[:, None, None], full.ids, 99), spec, captured=mask)
    assert wire.encode(other, "dense") == blob  # what an uncaptured row holds has no meaning, and is not sent
    assert wire.encode(full[0:0], "dense") == wire.encode(Routes.missing(0, spec), "dense")
    assert not wire.decode(blob).ids[~mask].any()
    offset = wire.read_header(blob).payload_offset
    with pytest.raises(WireError, match="row 2 is not captured"):
        wire.decode(patched(blob, offset + 2 * spec.row_bytes + 5, b"\1"))


@pytest.mark.parametrize("held", [bytearray, lambda blob: memoryview(bytearray(blob)).toreadonly()])
@pytest.mark.parametrize("check_rows", [True, False])
def test_a_blob_that_can_still_be_written_to_is_copied(held: Callable[[bytes], Any], check_rows: bool) -> None:
    routes = random_routes(20, spec_of(128, 8))
    blob = held(wire.encode(routes, "dense"))
    back = wire.decode(blob, check_rows=check_rows)
    writable = blob if isinstance(blob, bytearray) else blob.obj
    writable[-100:] = bytes(100)
    assert back == routes


def test_a_read_only_map_of_a_file_is_read_in_place(tmp_path: pathlib.Path) -> None:
    routes = random_routes(20, spec_of(128, 8))
    (tmp_path / "blob").write_bytes(wire.encode(routes, "dense"))
    with (tmp_path / "blob").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    back = wire.decode(mapped)
    assert back == routes
    assert np.shares_memory(back.ids, np.frombuffer(mapped, np.uint8))


def test_a_forged_row_among_holes_is_named_by_its_own_number_and_layer() -> None:
    spec = spec_of(128, 8, 3)
    mask = np.array([True, False, False, True, True, False])
    blob = wire.encode(Routes(random_routes(6, spec).ids, spec, captured=mask), "dense")
    offset = wire.read_header(blob).payload_offset
    for row, layer in ((0, 0), (0, 2), (3, 0), (3, 1), (4, 2)):
        with pytest.raises(WireError, match=f"row {row}, layer {layer}: expected .* different experts"):
            wire.decode(patched(blob, offset + row * spec.row_bytes + layer * 8, b"\7\7"))
    for row in (1, 2, 5):
        for byte in (0, spec.row_bytes - 1):
            with pytest.raises(WireError, match=f"row {row} is not captured"):
                wire.decode(patched(blob, offset + row * spec.row_bytes + byte, b"\1"))
