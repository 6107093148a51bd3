"""The envelope: round trips, the worked example of the docs, and everything that must be refused."""

from __future__ import annotations

import mmap
import re
import struct
import tempfile
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from router_replay import RouterSpec, Routes, wire
from router_replay.errors import WireError
from tests.wire.blobs import FIELDS, forged, patched, random_routes, routes_of, sealed, spec_of, specs

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 3), num_layers=4)
IDS = [[[5, 0], [2, 7]], [[0, 0], [0, 0]], [[1, 5], [7, 3]]]
ROUTES = Routes(IDS, SPEC, captured=[True, False, True], versions=[7, 7, 8])
TOKENS = [11, 12, 13, 14]
BLOBS = {codec: wire.encode(ROUTES, codec, token_ids=TOKENS, start=1) for codec in ("sets", "dense")}
WHOLE = [wire.encode(random_routes(rows, SPEC), "dense") for rows in (5, 60)]  # hashed and checked in one pass
codecs = pytest.mark.parametrize("codec", ["sets", "dense"])


@given(st.data(), st.sampled_from(["sets", "dense"]), st.integers(0, 1 << 40), st.booleans())
def test_round_trip(data: st.DataObject, codec: str, start: int, with_tokens: bool) -> None:
    spec = data.draw(specs(ordered=False if codec == "sets" else None))
    routes = data.draw(routes_of(spec))
    tokens = None
    if with_tokens:
        start %= 50
        tokens = data.draw(st.lists(st.integers(-1, 200_000), min_size=start + len(routes), max_size=start + 60))
    blob = wire.encode(routes, codec, token_ids=tokens, start=start)
    back = wire.decode(blob, token_ids=tokens, spec=spec)
    header = wire.read_header(blob)
    assert (header.spec, header.rows, header.start, header.codec) == (spec, len(routes), start, codec)
    assert header.has_token_digest == with_tokens
    assert back.spec.num_layers == spec.num_layers
    assert back.ids.dtype == spec.dtype
    assert not back.ids.flags.writeable
    assert back.captured_runs == routes.captured_runs
    assert back.version_runs == routes.version_runs
    assert not back.ids[~routes.captured].any()
    if codec == "dense":
        assert back == routes
    else:
        assert back.same_sets(routes)
        np.testing.assert_array_equal(back.ids, np.sort(back.ids, axis=-1))
    assert wire.encode(back, codec, token_ids=tokens, start=start) == blob  # one way only to write them


def test_worked_example_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire_format.md").read_text()
    text = text[text.index("## A worked example") :]
    dump = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} )+)", text, re.MULTILINE)
    assert bytes.fromhex("".join(dump)) == BLOBS["sets"]
    assert BLOBS["sets"][0x90:0x93] == (10 + (23 << 5) + (11 << 10) + (24 << 15)).to_bytes(3, "little")  # by hand
    assert BLOBS["dense"][0x90:-8] == bytes([5, 0, 2, 7, 0, 0, 0, 0, 1, 5, 7, 3])


@codecs
def test_every_truncation_and_extension_raises(codec: str) -> None:
    blob = BLOBS[codec]
    for length in range(len(blob)):
        for cut in (blob[:length], sealed(blob[:length]) if length > 8 else b""):
            with pytest.raises(WireError):
                wire.decode(cut)
    for tail in (b"\0", b"\0" * 8, blob):
        with pytest.raises(WireError):
            wire.decode(blob + tail)


@pytest.mark.parametrize("original", [*BLOBS.values(), *WHOLE], ids=["sets", "dense", "dense, short", "dense, long"])
def test_every_flipped_bit_raises(original: bytes) -> None:
    for bit in range(8 * len(original)):
        blob = bytearray(original)
        blob[bit // 8] ^= 1 << bit % 8
        for read in (wire.decode, wire.read_header):
            with pytest.raises(WireError):
                read(blob)


@codecs
@pytest.mark.parametrize("field", FIELDS)
def test_every_header_field_is_held_to_the_rest(codec: str, field: str) -> None:
    """Each field alone changed, with a right checksum: nothing else in the blob agrees with it any more.

    Two fields say something that the rest cannot contradict: where the rows start, and how many dense
    layers follow the last routed one. With the tokens at hand `start` is held to them.
    """
    offset, form = FIELDS[field]
    (old,) = struct.unpack_from(form, BLOBS[codec], offset)
    top = (1 << 8 * struct.calcsize(form)) - 1
    for value in {0, 1, 2, 3, old + 1, old - 1, old ^ 16, 10**12 & top, top} - {old, -1}:
        blob = forged(BLOBS[codec], **{field: value})
        if field == "start" and value <= 1 << 40:
            if value > 1:
                with pytest.raises(WireError, match="rows end at position"):
                    wire.decode(blob, token_ids=TOKENS)
        elif field == "num_layers" and (value == 0 or value > 3):
            assert wire.decode(blob).spec.num_layers == (value or None)
        elif codec == "dense" and field == "num_experts" and 8 <= value <= 256:
            assert wire.decode(blob).spec.num_experts == value  # one byte per id either way
        elif field == "flags" and (value ^ old) == 1 and codec == "dense":
            assert wire.decode(blob).spec.ordered
        else:
            with pytest.raises(WireError):
                wire.decode(blob)


@pytest.mark.parametrize("lengths", [(0, 2, 1), (1, 2, 0), (1, 1, 2), (2**64 - 1, 1, 3), (2**63, 2**63, 3), (3, 0, 0)])
def test_runs_that_are_not_canonical_raise(lengths: tuple[int, int, int]) -> None:
    with pytest.raises(WireError, match="captured runs"):
        wire.decode(patched(BLOBS["dense"], 64, struct.pack("<3Q", *lengths)))


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ((7, 2, 7, 1), "have the same version"),
        ((7, 3, 8, 0), "1 to 3"),
        ((7, 1, 8, 1), "expected 3 rows in all runs together"),
        ((7, 2, 2**63, 1), "2\\*\\*63"),
    ],
)
def test_version_runs_that_are_not_canonical_raise(pairs: tuple[int, ...], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.decode(patched(BLOBS["dense"], 88, struct.pack("<4Q", *pairs)))


def test_no_rows_have_no_first_row() -> None:
    empty = wire.encode(Routes.missing(0, SPEC))
    assert len(wire.decode(empty)) == 0
    with pytest.raises(WireError, match="the blob has no rows"):
        wire.decode(forged(empty, flags=8))


def test_layers_and_padding_are_checked() -> None:
    with pytest.raises(WireError, match="ascending"):
        wire.decode(patched(BLOBS["dense"], 0x88, struct.pack("<2I", 3, 1)))
    with pytest.raises(WireError, match=r"num_layers must be .* got 4"):
        wire.decode(patched(BLOBS["dense"], 0x88, struct.pack("<2I", 1, 9)))
    one_layer = wire.encode(Routes([[[5, 0]]], spec_of(8, 2, layers=1)), "dense")
    with pytest.raises(WireError, match="padding"):
        wire.decode(patched(one_layer, 64 + 8 + 4, b"\1"))


def test_huge_claims_allocate_nothing() -> None:
    one_set = wire.encode(Routes(np.arange(8)[None, None], spec_of(8, 8, layers=1)))  # k = E: no bits at all
    missing = wire.encode(Routes.missing(1, spec_of(8, 2)))
    tracemalloc.start()
    for blob in (one_set, missing, BLOBS["sets"], BLOBS["dense"]):
        for rows in (10**12, 1 << 40, 2**63, 2**64 - 1):
            claimed = forged(blob, rows=rows)
            consistent = patched(claimed, 64, struct.pack("<Q", rows))  # the one run agrees with it
            for bad in (claimed, consistent):
                with pytest.raises(WireError):
                    wire.decode(bad)
        for field in ("captured_runs", "version_runs", "layer_count", "payload_length", "header_length"):
            with pytest.raises(WireError):
                wire.decode(forged(blob, **{field: (1 << 32) - 16}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_expansion_limit_can_be_moved() -> None:
    rows = 40_000_000  # 640 MB of ids from some hundred bytes
    missing = wire.encode(Routes.missing(1, spec_of(65536, 8, layers=1)))
    blob = patched(forged(missing, rows=rows), 64, struct.pack("<Q", rows))
    with pytest.raises(WireError, match=f"max_bytes={rows * 16}"):
        wire.decode(blob)
    with pytest.raises(WireError, match="limit of 31"):
        wire.decode(wire.encode(Routes.missing(2, spec_of(65536, 8, layers=1))), max_bytes=31)
    assert len(wire.decode(wire.encode(Routes.missing(2, spec_of(65536, 8, layers=1))), max_bytes=32)) == 2


def test_tokens() -> None:
    blob = BLOBS["sets"]
    assert len(wire.decode(blob, token_ids=np.array(TOKENS, np.int32))) == 3
    for other in ([11, 12, 13, 15], [11, 12, 13, 14, 15], [12, 11, 13, 14]):
        with pytest.raises(WireError, match="other tokens"):
            wire.decode(blob, token_ids=other)
    with pytest.raises(WireError, match="no token digest"):
        wire.decode(wire.encode(ROUTES), token_ids=TOKENS)
    with pytest.raises(WireError, match="end at position 5, got 4"):
        wire.encode(ROUTES, token_ids=TOKENS, start=2)
    for wrong in ([[1, 2]], [1.5, 2.5, 3.5, 4.5], np.array([2**63] * 4, np.uint64)):
        with pytest.raises(WireError, match="token_ids"):
            wire.encode(ROUTES, token_ids=wrong)


def test_spec_is_compared_and_both_are_named() -> None:
    with pytest.raises(WireError, match=r"expected RouterSpec\(num_experts=16.*got RouterSpec\(num_experts=8"):
        wire.decode(BLOBS["sets"], spec=RouterSpec(16, 2, (1, 3)))
    unknown = wire.encode(Routes([[[5, 0]]], spec_of(8, 2, layers=1)))
    assert wire.decode(unknown, spec=spec_of(8, 2, layers=1, num_layers=7)).spec.num_layers == 7


@codecs
def test_what_a_blob_may_be(codec: str) -> None:
    blob = BLOBS[codec]
    with tempfile.TemporaryFile() as file:
        file.write(blob)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        shifted = memoryview(b"x" + blob)[1:]
        for form in (blob, bytearray(blob), memoryview(blob), shifted, np.frombuffer(blob, np.uint8), mapped):
            assert wire.decode(form).same_sets(ROUTES)
    for wrong in ("text", None, 5, memoryview(blob)[::2]):
        with pytest.raises(WireError):
            wire.decode(wrong)
    with pytest.raises(WireError, match="not a blob of Router Replay"):
        wire.decode(b"\x93NUMPY" + bytes(200))
    with pytest.raises(WireError, match="knows 1 and 2, got 3; update"):
        wire.decode(forged(blob, format_version=3))


def test_what_cannot_be_written() -> None:
    with pytest.raises(WireError, match="codec must be one of"):
        wire.encode(ROUTES, "gzip")
    for start in (-1, 1.5, True, (1 << 40) + 1):
        with pytest.raises(WireError, match="start"):
            wire.encode(ROUTES, start=start)
    with pytest.raises(WireError, match="layer ids"):
        wire.encode(Routes([[[5, 0]]], RouterSpec(8, 2, (1 << 32,))))


def test_damage_is_told_from_forgery() -> None:
    damaged = bytearray(BLOBS["dense"])
    damaged[0x90] = 0  # experts 0 and 0 now; but the checksum is the first thing wrong
    with pytest.raises(WireError, match="damaged or changed"):
        wire.decode(damaged)
    with pytest.raises(WireError, match="row 0, layer 1"):
        wire.decode(sealed(damaged))


# -- the last value that is taken, and the first that is not --------------------------------------


def test_rows_and_start_reach_to_2_to_the_40_and_no_further() -> None:
    most = 1 << 40
    blob = wire.encode(ROUTES, start=most)
    assert wire.read_header(blob).start == most
    assert wire.read_header(forged(blob, start=most)).start == most
    for field in ("start", "rows"):
        with pytest.raises(WireError, match=r"rows and start must not exceed 2\*\*40"):
            wire.read_header(forged(blob, **{field: most + 1}))
    many = wire.encode(Routes.missing(1, SPEC))
    claimed = patched(forged(many, rows=most), 64, struct.pack("<Q", most))
    assert wire.read_header(claimed).rows == most


def test_layer_ids_and_numbers_of_layers_fit_four_bytes() -> None:
    last = (1 << 32) - 1
    blob = wire.encode(Routes([[[5, 0]]], RouterSpec(8, 2, (last,))))
    assert wire.decode(blob).spec.layers == (last,)
    known = wire.encode(Routes([[[5, 0]]], RouterSpec(8, 2, (0,), num_layers=last)))
    assert wire.decode(known).spec.num_layers == last
    with pytest.raises(WireError, match="layer ids and num_layers must be below"):
        wire.encode(Routes([[[5, 0]]], RouterSpec(8, 2, (0,), num_layers=last + 1)))


def test_policy_versions_reach_to_2_to_the_63_and_one_run_may_hold_all_rows() -> None:
    routes = Routes(IDS, SPEC, captured=[True, False, True], versions=[2**63 - 1, 0, 0])
    assert wire.decode(wire.encode(routes)).versions.tolist() == [2**63 - 1, 0, 0]
    assert wire.decode(wire.encode(ROUTES.with_versions(4))).versions.tolist() == [4, 4, 4]


def test_more_than_1024_layers_are_read_like_few() -> None:
    for layers in (1024, 1025):
        spec = spec_of(8, 2, layers=layers)
        assert wire.decode(wire.encode(Routes(np.tile([0, 1], (1, layers, 1)), spec))).spec == spec


def test_version_runs_need_their_flag() -> None:
    blob = wire.encode(ROUTES)
    with pytest.raises(WireError, match="expected none, since the flag for them is 0, got"):
        wire.decode(forged(blob, flags=blob[11] & ~2))


def test_reserved_flags_and_unknown_codecs_are_refused_by_name() -> None:
    blob = BLOBS["sets"]
    with pytest.raises(WireError, match="reserved bits"):
        wire.decode(forged(blob, flags=blob[11] | 16))
    with pytest.raises(WireError, match=r"codec: expected 0 \(dense\) or 1 \(sets\), got 2"):
        wire.decode(forged(blob, codec=2))


def test_what_is_too_short_for_a_header_is_called_truncated() -> None:
    for length in (8, 71):
        with pytest.raises(WireError, match=f"truncated: expected 72 bytes or more, got {length}"):
            wire.decode(BLOBS["sets"][:length])
    for nothing in (b"", memoryview(b""), np.zeros(0, np.uint8)):
        with pytest.raises(WireError, match="magic"):
            wire.decode(nothing)


def test_an_error_tells_how_many_bytes_the_header_and_the_rows_take() -> None:
    blob = BLOBS["dense"]
    with pytest.raises(WireError, match=rf"expected {len(blob)} bytes from the header, got {len(blob) + 1}"):
        wire.decode(blob + b"\0")
    with pytest.raises(WireError, match="take 12 bytes with codec 'dense', got 13"):
        wire.decode(sealed(forged(blob, payload_length=13)[:-8] + bytes(9)))


def test_threads_and_limits_are_whole_numbers() -> None:
    for arguments in ({"threads": -1}, {"threads": 1.5}, {"max_bytes": -1}, {"max_bytes": 0.5}):
        with pytest.raises(WireError, match=next(iter(arguments))):
            wire.decode(BLOBS["sets"], **arguments)


def test_a_spec_of_the_blob_with_its_number_of_layers_is_kept() -> None:
    assert wire.decode(BLOBS["sets"], spec=RouterSpec(8, 2, (1, 3))).spec.num_layers == 4
    assert wire.decode(BLOBS["sets"], spec=RouterSpec(8, 2, (1, 3), num_layers=9)).spec.num_layers == 4
