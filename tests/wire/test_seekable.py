"""The seekable form: a part equals the slice of the whole, only its bytes are read, and damage is found there."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from router_replay import RouterSpec, Routes, wire
from router_replay.errors import WireError
from router_replay.wire.chunks import Chunks
from tests.wire.blobs import FIELDS, random_routes, routes_of, spec_of, specs

SPEC = RouterSpec(128, 8, (1, 2, 3, 5, 8), num_layers=9)
SMALL = RouterSpec(8, 2, (1, 3), num_layers=4)
codecs = pytest.mark.parametrize("codec", ["sets", "dense"])


def long_routes(rows: int, spec: RouterSpec = SPEC, seed: int = 0) -> Routes:
    """Routes of several blocks with gaps and versions."""
    rng = np.random.default_rng(seed)
    ids = random_routes(rows, spec, seed).ids
    captured = np.repeat(rng.random(rows // 50 + 1) < 0.8, 50)[:rows]
    versions = np.repeat(rng.integers(0, 3, rows // 40 + 1), 40)[:rows]
    return Routes(ids, spec, captured=captured, versions=versions)


def part_of(routes: Routes, first: int, last: int, layers: tuple[int, ...]) -> Routes:
    rows = routes[first:last]
    columns = [column for column, layer in enumerate(routes.spec.layers) if layer in layers]
    return Routes(rows.ids[:, columns], routes.spec.select(layers), captured=rows.captured, versions=rows.versions)


def resealed(blob: bytes) -> bytes:
    """The blob with a right checksum of its header: what a forger would send."""
    (length,) = struct.unpack_from("<I", blob, 12)
    front = blob[: length - 8]
    return front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little") + blob[length:]


@given(st.data(), st.sampled_from(["sets", "dense"]), st.booleans())
def test_round_trip(data: st.DataObject, codec: str, with_tokens: bool) -> None:
    routes = data.draw(routes_of(data.draw(specs(ordered=False if codec == "sets" else None))))
    tokens = list(range(3, 3 + 5 + len(routes))) if with_tokens else None
    blob = wire.encode(routes, codec, token_ids=tokens, start=5, seekable=True)
    back = wire.decode(blob, token_ids=tokens, spec=routes.spec)
    header = wire.read_header(blob)
    assert header.seekable
    assert (header.rows, header.start, header.codec) == (len(routes), 5, codec)
    assert back.same_sets(routes)
    assert back.captured_runs == routes.captured_runs
    assert back.version_runs == routes.version_runs
    assert not back.ids.flags.writeable
    np.testing.assert_array_equal(back.ids, wire.decode(wire.encode(routes, codec)).ids)
    assert wire.encode(back, codec, token_ids=tokens, start=5, seekable=True) == blob


def test_worked_example_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire_format.md").read_text()
    section = text[text.index("## Version 2") : text.index("## What a reader must not do")]
    end = bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} )+)", section, re.MULTILINE)))
    ids = [[[5, 0], [2, 7]], [[0, 0], [0, 0]], [[1, 5], [7, 3]]]
    routes = Routes(ids, SMALL, captured=[True, False, True], versions=[7, 7, 8])
    plain, blob = (wire.encode(routes, token_ids=[11, 12, 13, 14], start=1, seekable=form) for form in (False, True))
    assert blob[0x90:] == end
    assert blob[:0x90] == plain[:8] + b"\x02\0" + plain[10:12] + b"\xa0\0\0\0" + plain[16:0x90]


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["sets", "dense"]), st.integers(0, 900), st.integers(0, 3))
def test_a_part_equals_the_slice_of_the_whole(data: st.DataObject, codec: str, rows: int, seed: int) -> None:
    spec = data.draw(st.sampled_from([SPEC, SMALL, RouterSpec(300, 3, (0, 0, 4)), spec_of(512, 22, 3)]))
    routes = long_routes(rows, spec, seed)
    blob = wire.encode(routes, codec, seekable=True)
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    layers = tuple(sorted(data.draw(st.sets(st.sampled_from(spec.layers), min_size=1))))
    part = wire.Reader(blob).read(first, last, layers)
    expected = part_of(routes, first, last, layers)
    assert part.spec == expected.spec
    assert part.same_sets(expected)
    assert part.captured_runs == expected.captured_runs
    assert part.version_runs == expected.version_runs
    assert wire.Reader(blob).read(first, last).same_sets(routes[first:last])


@codecs
def test_only_the_chunks_of_the_part_are_read(codec: str) -> None:
    spec = spec_of(128, 8, 48)
    routes = random_routes(2048, spec)
    blob = wire.encode(routes, codec, seekable=True)
    asked: list[tuple[int, int]] = []

    def read(start: int, end: int) -> bytes:
        asked.append((start, end))
        return blob[start:end]

    reader = wire.Reader(read)
    front = reader.bytes_read
    assert front == reader.header.payload_offset
    assert reader.read(512, 768).same_sets(routes[512:768])
    block = len(blob) - front
    assert reader.bytes_read - front == block // 8  # one of eight blocks
    assert len(asked) == 3  # the fixed header, the rest of the header, and one range
    before = reader.bytes_read
    reader.read(512, 768, layers=range(12, 24))
    share = (reader.bytes_read - before) / (block // 8)
    assert share == (0.25 if codec == "sets" else 1.0)  # dense rows stay whole


@pytest.mark.parametrize(
    "spec", [spec_of(128, 8, 48), spec_of(256, 8, 58), spec_of(384, 8, 60), spec_of(512, 22, 40), spec_of(16, 4, 16)]
)
@pytest.mark.parametrize("rows", [1024, 1025, 1279, 4000])
def test_it_is_at_most_one_percent_larger(spec: RouterSpec, rows: int) -> None:
    routes = random_routes(rows, spec)
    for codec in ("sets", "dense"):
        assert len(wire.encode(routes, codec, seekable=True)) <= 1.01 * len(wire.encode(routes, codec))


def test_the_sizes_of_chunks_follow_from_the_spec() -> None:
    chunks = Chunks(spec_of(128, 8, 48), "sets", 1000)
    assert (chunks.block_rows, len(chunks.groups), chunks.groups[0], chunks.blocks) == (256, 24, range(2), 4)
    assert Chunks(spec_of(128, 8, 48), "dense", 1000).groups == [range(48)]
    small = Chunks(spec_of(8, 2, 3), "sets", 1)
    assert (small.block_rows, small.groups) == (1024, [range(2), range(2, 3)])
    assert small.block_rows * 2 * 2 >= 4096


@codecs
def test_every_flipped_bit_raises(codec: str) -> None:
    routes = Routes([[[5, 0], [2, 7]], [[0, 0], [0, 0]], [[1, 5], [7, 3]]], SMALL, captured=[True, False, True])
    original = wire.encode(routes, codec, token_ids=[1, 2, 3], seekable=True)
    for bit in range(8 * len(original)):
        blob = bytearray(original)
        blob[bit // 8] ^= 1 << bit % 8
        for read in (wire.decode, wire.read_header):
            with pytest.raises(WireError):
                read(blob)


@codecs
def test_damage_is_found_where_it_is_read_and_only_there(codec: str) -> None:
    routes = long_routes(700)
    blob = bytearray(wire.encode(routes, codec, seekable=True))
    blob[-1] ^= 1
    reader = wire.Reader(blob)
    assert reader.read(0, 200).same_sets(routes[:200])
    with pytest.raises(WireError, match="checksum of chunk"):
        reader.read(500, 700)
    with pytest.raises(WireError, match="checksum of chunk"):
        wire.read_header(blob)


@codecs
def test_every_truncation_and_extension_raises(codec: str) -> None:
    blob = wire.encode(random_routes(3, SMALL), codec, seekable=True)
    for length in range(len(blob)):
        with pytest.raises(WireError):
            wire.decode(blob[:length])
    for tail in (b"\0", bytes(8), blob):
        with pytest.raises(WireError):
            wire.decode(blob + tail)
    with pytest.raises(WireError, match="truncated: expected bytes"):
        wire.Reader(lambda start, end: blob[start : end - 1])


@codecs
@pytest.mark.parametrize("field", ["header_length", "rows", "payload_length", "captured_runs", "layer_count", "codec"])
def test_a_forged_header_is_held_to_the_rest(codec: str, field: str) -> None:
    blob = wire.encode(random_routes(300, SPEC), codec, seekable=True)
    offset, form = FIELDS[field]
    (old,) = struct.unpack_from(form, blob, offset)
    top = (1 << 8 * struct.calcsize(form)) - 1
    for value in {0, 1, 2, old + 1, old - 1, old + 16, 10**12 & top, top} - {old, -1}:
        changed = bytearray(blob)
        struct.pack_into(form, changed, offset, value)
        forgeries = [bytes(changed)]
        if field != "header_length" or 72 <= value < len(blob):
            forgeries.append(resealed(bytes(changed)))
        for forged in forgeries:
            with pytest.raises(WireError):
                wire.decode(forged)


def test_bad_rows_with_right_checksums_raise() -> None:
    blob = bytearray(wire.encode(random_routes(300, SMALL), "dense", seekable=True))
    header = wire.read_header(blob)
    row = 270
    at = header.payload_offset + row * SMALL.row_bytes + SMALL.top_k
    blob[at : at + 2] = b"\x03\x03"
    position = bytes(blob).index(header.chunk_sums or b"")
    payload = bytes(blob[header.payload_offset :])
    struct.pack_into("<Q", blob, position, xxhash.xxh3_64_intdigest(payload))
    with pytest.raises(WireError, match=f"row {row}, layer 3: expected 2 different experts"):
        wire.decode(resealed(bytes(blob)))


def test_a_rank_that_encodes_no_set_names_its_place() -> None:
    spec = spec_of(8, 2, 2)  # 28 sets in 5 bits: the ranks 28 to 31 encode none
    blob = bytearray(wire.encode(random_routes(3, spec), seekable=True))
    header = wire.read_header(blob)
    blob[header.payload_offset :] = b"\xff" * (header.payload_length - 1) + b"\x3f"
    position = bytes(blob).index(header.chunk_sums or b"")
    struct.pack_into("<Q", blob, position, xxhash.xxh3_64_intdigest(bytes(blob[header.payload_offset :])))
    with pytest.raises(WireError, match="captured row 0, layer 0"):
        wire.decode(resealed(bytes(blob)))


def test_huge_claims_and_wrong_arguments_raise() -> None:
    missing = bytearray(wire.encode(Routes.missing(1, SMALL), seekable=True))
    struct.pack_into("<Q", missing, 32, 1 << 40)
    struct.pack_into("<Q", missing, 64, 1 << 40)
    with pytest.raises(WireError, match="more than the limit"):
        wire.decode(resealed(bytes(missing)))
    blob = wire.encode(random_routes(10, SMALL), seekable=True)
    reader = wire.Reader(blob)
    assert len(reader) == 10
    assert len(reader.read(4, 4)) == 0
    for first, last in ((-1, 3), (4, 3), (0, 11), (11, 11), (0.0, 1)):
        with pytest.raises(WireError):
            reader.read(first, last)  # type: ignore[arg-type]
    with pytest.raises(WireError, match="layers: layers \\[2\\] have no router"):
        reader.read(layers=[2])
    with pytest.raises(WireError, match="another model"):
        wire.Reader(blob, spec=SPEC)
    with pytest.raises(WireError, match="not seekable"):
        wire.Reader(wire.encode(random_routes(10, SMALL)))
    with pytest.raises(WireError, match="other tokens"):
        wire.decode(wire.encode(random_routes(2, SMALL), token_ids=[1, 2], seekable=True), token_ids=[1, 3])


def test_memory_that_can_change_is_copied() -> None:
    routes = random_routes(300, SMALL)
    blob = bytearray(wire.encode(routes, "dense", seekable=True))
    back = wire.Reader(blob).read(10, 290)
    blob[-600:] = bytes(600)
    assert back == routes[10:290]


def test_dense_rows_are_a_view_of_the_blob() -> None:
    blob = wire.encode(random_routes(600, SPEC), "dense", seekable=True)
    ids = wire.Reader(blob).read(300, 500).ids
    assert np.shares_memory(ids, np.frombuffer(blob, np.uint8))
