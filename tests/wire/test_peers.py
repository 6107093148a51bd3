"""Peers' formats: payloads written by hand, round trips, and every kind of bad input."""

from __future__ import annotations

import base64
import io
import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire import peers

# Four decoder layers of which 0 is dense, 2 of 8 experts; two rows.
SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 2, 3), num_layers=4)
ROWS = [[[5, 0], [2, 7], [1, 4]], [[3, 6], [0, 1], [7, 2]]]
ENGINE = [0, 0, 5, 0, 2, 7, 1, 4, 0, 0, 3, 6, 0, 1, 7, 2]  # the same with the dense layer's zeros
SHAPE = [2, 4, 2]
WIDE = RouterSpec(num_experts=512, top_k=2, layers=(0,), num_layers=1)


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def npy(
    raw: bytes, descr: str = "|u1", shape: str = "(2, 4, 2)", fortran: str = "False", version: int = 1, pad: int = 11
) -> str:
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    header += b" " * pad + b"\n"  # 11 makes the base64 of the payload below end in padding
    return b64(
        b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header + raw
    )


def packed(fmt: str, values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}{fmt}", *values)


def prime(**changes: Any) -> dict[str, Any]:
    return {"data": b64(packed("B", ENGINE)), "shape": SHAPE, "start": 0, "dtype": "uint8"} | changes


def skyrl(**changes: Any) -> dict[str, Any]:
    return {"data": b64(packed("B", ENGINE)), "shape": SHAPE, "dtype": "uint8"} | changes


def nemo(values: list[int], dtype: str = "int8", shape: str = "2x4x2", fmt: str = "b") -> str:
    return f"nrlre1:{dtype}:{shape}:{b64(packed(fmt, values))}"


def without(payload: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in payload.items() if key != field}


PAYLOADS: dict[str, tuple[Callable[..., Routes], Callable[..., Any], Any]] = {
    "vllm": (peers.from_vllm, peers.to_vllm, npy(packed("B", ENGINE))),
    "sglang": (peers.from_sglang, peers.to_sglang, b64(packed("i", ENGINE))),
    "prime_rl": (peers.from_prime_rl, peers.to_prime_rl, prime()),
    "dynamo": (peers.from_dynamo, peers.to_dynamo, prime()),
    "skyrl": (peers.from_skyrl, peers.to_skyrl, skyrl()),
    "nemo": (peers.from_nemo, peers.to_nemo, nemo(ENGINE)),
}


# -- what peers really send ---------------------------------------------------------------------


@pytest.mark.parametrize("peer", PAYLOADS)
def test_reads_a_payload_written_by_hand(peer: str) -> None:
    read, _, payload = PAYLOADS[peer]
    routes = read(payload, SPEC)
    assert routes.ids.tolist() == ROWS
    assert routes.ids.dtype == np.uint8
    assert routes.all_captured
    as_bytes = json.dumps(payload).encode() if isinstance(payload, dict) else payload.encode()
    assert read(as_bytes, SPEC) == routes
    if isinstance(payload, dict):
        assert read(as_bytes.decode(), SPEC) == routes


@pytest.mark.parametrize("peer", [peer for peer in PAYLOADS if peer != "vllm"])
def test_writes_what_was_written_by_hand(peer: str) -> None:
    _, write, payload = PAYLOADS[peer]
    assert write(Routes(ROWS, SPEC)) == payload


def test_vllm_text_is_what_numpy_reads_and_writes() -> None:
    array = np.array(ENGINE, np.uint8).reshape(SHAPE)
    file = io.BytesIO()
    np.save(file, array)
    assert peers.to_vllm(Routes(ROWS, SPEC)) == b64(file.getvalue())
    assert peers.from_vllm(b64(file.getvalue()), SPEC).ids.tolist() == ROWS


def test_vllm_reads_fortran_order_big_endian_and_version_2() -> None:
    array = np.array(ENGINE, ">u2").reshape(SHAPE)
    file = io.BytesIO()
    np.save(file, np.asfortranarray(array))
    assert b"'fortran_order': True" in file.getvalue()
    assert peers.from_vllm(b64(file.getvalue()), SPEC).ids.tolist() == ROWS
    assert peers.from_vllm(npy(packed("B", ENGINE), version=2), SPEC).ids.tolist() == ROWS


def test_all_routed_layers_of_the_right_dtype_are_read_without_a_copy_of_the_rows() -> None:
    spec = RouterSpec(num_experts=128, top_k=8, layers=range(48), num_layers=48)
    ids = np.argsort(np.random.default_rng(0).random((200, 48, 128)), axis=2)[:, :, :8].astype(np.uint8)
    for read, write in ((peers.from_vllm, peers.to_vllm), (peers.from_prime_rl, peers.to_prime_rl)):
        routes = read(write(Routes(ids, spec)), spec)
        base = routes.ids
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base.base, bytes)  # what base64 gave, and nothing between
        assert np.array_equal(routes.ids, ids)


def test_dynamo_takes_the_whole_response() -> None:
    response = {"id": "x", "choices": [{"index": 0}], "nvext": {"timing": {}, "routed_experts": prime(start=3)}}
    assert peers.from_dynamo(response, SPEC).ids.tolist() == ROWS
    assert peers.from_dynamo(json.dumps(response), SPEC).ids.tolist() == ROWS
    assert peers.peer_start(response) == 3
    with pytest.raises(WireError, match=r"nvext\.routed_experts.*extra_fields"):
        peers.from_dynamo({"nvext": {}}, SPEC)
    with pytest.raises(WireError, match=r"nvext\.routed_experts"):
        peers.from_dynamo({"nvext": None}, SPEC)
    with pytest.raises(WireError, match="from_sglang"):
        peers.from_dynamo({"nvext": {"routed_experts": b64(packed("i", ENGINE))}}, SPEC)
    with pytest.raises(WireError, match="null"):
        peers.from_dynamo({"nvext": {"routed_experts": None}}, SPEC)
    with pytest.raises(WireError):  # prime-rl has no such envelope
        peers.from_prime_rl(response, SPEC)


def test_start_is_read_and_held_against_the_prompt() -> None:
    for read, write in ((peers.from_prime_rl, peers.to_prime_rl), (peers.from_dynamo, peers.to_dynamo)):
        payload = write(Routes(ROWS, SPEC), start=7)
        assert payload["start"] == 7
        assert peers.peer_start(payload) == 7
        assert peers.peer_start(json.dumps(payload)) == 7
        assert len(read(payload, SPEC, prompt_length=7)) == 2
        with pytest.raises(WireError, match="start: 7 lies beyond the prompt of 6"):
            read(payload, SPEC, prompt_length=6)
        with pytest.raises(WireError, match="prompt_length"):
            read(payload, SPEC, prompt_length="6")
        for start in (-1, True, 1.0, 1 << 63):
            with pytest.raises(WireError, match="start"):
                write(Routes(ROWS, SPEC), start=start)
    with pytest.raises(WireError, match="start"):
        peers.peer_start(prime(start=-1))


@pytest.mark.parametrize("peer", ["prime_rl", "dynamo", "skyrl"])
def test_data_may_be_a_view_of_the_response(peer: str) -> None:
    read, _, payload = PAYLOADS[peer]
    data = payload["data"].encode()
    for view in (data, bytearray(data), memoryview(b"x" + data)[1:]):
        assert read(payload | {"data": view}, SPEC).ids.tolist() == ROWS


# -- missing rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [peer for peer in PAYLOADS if peer != "nemo"])
def test_a_missing_row_cannot_be_written(peer: str) -> None:
    with pytest.raises(WireError, match="row 1 is not captured"):
        PAYLOADS[peer][1](Routes(ROWS, SPEC, captured=[True, False]))


def test_nemo_says_missing_with_minus_one() -> None:
    text = nemo([*ENGINE[:8], *[-1] * 8])
    routes = peers.from_nemo(text, SPEC)
    assert routes.captured.tolist() == [True, False]
    assert routes[:1].ids.tolist() == ROWS[:1]
    assert peers.to_nemo(Routes(ROWS, SPEC, captured=[True, False])) == text
    assert peers.from_nemo(text.encode(), SPEC) == routes
    nothing = peers.from_nemo(nemo([-1] * 16), SPEC)
    assert nothing.captured.tolist() == [False, False]


def test_nemo_missing_rows_neither_make_nor_hide_a_layer_that_never_ran() -> None:
    spec = RouterSpec(num_experts=8, top_k=1, layers=(0, 1))
    one = peers.from_nemo(nemo([-1, -1, 3, 0], shape="2x2x1"), spec)  # one captured row may well be expert 0
    assert one.captured.tolist() == [False, True]
    with pytest.raises(WireError, match=r"layers \[1\] are zero"):
        peers.from_nemo(nemo([-1, -1, 3, 0, 4, 0], shape="3x2x1"), spec)


@pytest.mark.parametrize("place", [8, 9, 10, 15])
def test_nemo_refuses_a_row_that_is_partly_missing(place: int) -> None:
    values = list(ENGINE)
    values[place] = -1
    with pytest.raises(WireError, match=f"data: row 1 is missing .* layer {(place - 8) // 2}"):
        peers.from_nemo(nemo(values), SPEC)


def test_nemo_keeps_the_row_of_an_error_after_missing_rows() -> None:
    with pytest.raises(WireError, match="row 1, layer 1: experts \\[3, 3\\]"):
        peers.from_nemo(nemo([*[-1] * 8, 0, 0, 3, 3, 0, 1, 7, 2]), SPEC)
    with pytest.raises(WireError, match="negative expert id -2"):
        peers.from_nemo(nemo([*[-1] * 8, 0, 0, 3, -2, 0, 1, 7, 2]), SPEC)


def test_nemo_chooses_the_dtype_from_the_number_of_experts() -> None:
    for experts, dtype in ((128, "int8"), (129, "int16"), (32768, "int16"), (32769, "int32")):
        spec = RouterSpec(num_experts=experts, top_k=1, layers=(0,))
        text = peers.to_nemo(Routes([[[experts - 1]]], spec))
        assert text.startswith(f"nrlre1:{dtype}:1x1x1:")
        assert peers.from_nemo(text, spec).ids.tolist() == [[[experts - 1]]]


# -- dtypes that depend on values ---------------------------------------------------------------


def test_a_wide_value_is_widened_to_the_spec_and_never_truncated() -> None:
    raw = b64(packed("i", [300, 5]))
    for read, payload in (
        (peers.from_skyrl, {"data": raw, "shape": [1, 1, 2], "dtype": "int32"}),
        (peers.from_prime_rl, {"data": raw, "shape": [1, 1, 2], "dtype": "int32", "start": 0}),
        (peers.from_sglang, raw),
        (peers.from_vllm, npy(packed("i", [300, 5]), "<i4", "(1, 1, 2)")),
        (peers.from_nemo, nemo([300, 5], "int32", "1x1x2", "i")),
    ):
        routes = read(payload, WIDE)
        assert routes.ids.dtype == np.uint16
        assert routes.ids.tolist() == [[[300, 5]]]
        narrow = RouterSpec(num_experts=128, top_k=2, layers=(0,), num_layers=1)
        with pytest.raises(WireError, match=r"row 0, layer 0: experts \[300, 5\]"):  # 300 % 256 = 44 would fit
            read(payload, narrow)


def test_a_narrow_turn_of_a_wide_model_becomes_the_models_dtype() -> None:
    payload = {"data": b64(bytes([200, 5])), "shape": [1, 1, 2], "dtype": "uint8"}
    assert peers.from_skyrl(payload, WIDE).ids.dtype == np.uint16
    assert peers.from_prime_rl(payload | {"start": 0}, WIDE).ids.dtype == np.uint16


def test_skyrl_gets_the_only_dtype_it_takes_for_the_values() -> None:
    for value, experts, dtype in ((255, 512, "uint8"), (256, 512, "int16"), (32768, 65536, "int32")):
        spec = RouterSpec(num_experts=experts, top_k=1, layers=(0,))
        payload = peers.to_skyrl(Routes([[[value]]], spec))
        assert payload["dtype"] == dtype
        assert peers.from_skyrl(payload, spec).ids.tolist() == [[[value]]]


def test_prime_rl_gets_the_models_dtype_whatever_the_values() -> None:
    assert peers.to_prime_rl(Routes([[[1, 2]]], WIDE))["dtype"] == "uint16"


# -- the layout is never guessed ----------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [4, None])
@pytest.mark.parametrize("peer", PAYLOADS)
def test_an_array_over_the_routed_layers_alone_is_refused(peer: str, num_layers: int | None) -> None:
    spec = RouterSpec(num_experts=8, top_k=2, layers=(1, 2, 3), num_layers=num_layers)
    flat = [expert for row in ROWS for layer in row for expert in layer]
    payload = {
        "vllm": npy(packed("B", flat), shape="(2, 3, 2)"),
        "sglang": b64(packed("i", flat)),
        "prime_rl": prime(data=b64(packed("B", flat)), shape=[2, 3, 2]),
        "dynamo": prime(data=b64(packed("B", flat)), shape=[2, 3, 2]),
        "skyrl": skyrl(data=b64(packed("B", flat)), shape=[2, 3, 2]),
        "nemo": nemo(flat, shape="2x3x2"),
    }[peer]
    with pytest.raises(WireError, match="layer"):
        PAYLOADS[peer][0](payload, spec)


def test_sglang_asks_for_num_layers_where_the_bytes_do_not_divide() -> None:
    text = b64(packed("i", [0] * 10))
    with pytest.raises(WireError, match=r"routed_experts.*give num_layers"):
        peers.from_sglang(text, RouterSpec(num_experts=8, top_k=2, layers=(1, 2)))
    with pytest.raises(WireError, match="40 bytes are not whole rows of 4 layers x 2") as info:
        peers.from_sglang(text, SPEC)
    assert "give num_layers" not in str(info.value)


@pytest.mark.parametrize("peer", PAYLOADS)
def test_a_layer_that_was_never_recorded_is_refused_unless_the_caller_knows_better(peer: str) -> None:
    spec = RouterSpec(num_experts=8, top_k=1, layers=(0, 1))
    read, write, _ = PAYLOADS[peer]
    payload = write(Routes([[[3], [0]], [[4], [0]]], spec))
    with pytest.raises(WireError, match=r"layers \[1\] are zero in all 2 rows"):
        read(payload, spec)
    assert read(payload, spec, allow_zero_layers=True).ids.tolist() == [[[3], [0]], [[4], [0]]]


@pytest.mark.parametrize("peer", PAYLOADS)
def test_two_routers_in_one_layer_have_no_place(peer: str) -> None:
    read, write, payload = PAYLOADS[peer]
    spec = RouterSpec(num_experts=8, top_k=2, layers=(1, 1, 3), num_layers=4)
    with pytest.raises(WireError, match="layer 1 holds two routers"):
        write(Routes(ROWS, spec))
    with pytest.raises(WireError, match="layer 1 holds two routers"):
        read(payload, spec)


# -- bad input, kind by kind --------------------------------------------------------------------

TEXT_FAULTS: dict[str, Any] = {
    "none": None,
    "number": 7,
    "foreign letters": "!!!!",
    "not ascii": "é",
    "surrogate": "\ud800",
    "white space": "AAAA\n",
    "no padding": "AAA",
    "surplus padding": "AAAA====",
    "bits under the padding": "AB==",
    "url alphabet": "__--",
}


@pytest.mark.parametrize("fault", TEXT_FAULTS)
@pytest.mark.parametrize("peer", PAYLOADS)
def test_text_that_is_not_base64(peer: str, fault: str) -> None:
    read, _, payload = PAYLOADS[peer]
    bad = TEXT_FAULTS[fault]
    field = "routed_experts"
    if isinstance(payload, dict):
        bad, field = payload | {"data": bad}, "data"
    elif peer == "nemo":
        bad, field = (f"nrlre1:int8:2x4x2:{bad}", "data") if isinstance(bad, str) else (bad, "text")
    with pytest.raises(WireError, match=field):
        read(bad, SPEC)


def stray_bits(text: str) -> str:
    """The same bytes to a careless reader: the last letter before the padding has bits that say nothing."""
    letters = text.rstrip("=")
    return letters[:-1] + chr(ord(letters[-1]) + 1) + text[len(letters) :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text + "====",
        lambda text: text.rstrip("="),
        lambda text: text[:8] + "\n" + text[8:],
        lambda text: text[:8] + "!!!!" + text[8:],
        lambda text: text[:8] + "==" + text[8:],
        stray_bits,
    ],
)
@pytest.mark.parametrize("peer", PAYLOADS)
def test_right_bytes_in_careless_base64_are_refused(peer: str, spoil: Callable[[str], str]) -> None:
    read, _, payload = PAYLOADS[peer]
    if isinstance(payload, dict):
        bad: Any = payload | {"data": spoil(payload["data"])}
    elif peer == "nemo":
        head, _, data = payload.rpartition(":")
        bad = f"{head}:{spoil(data)}"
    else:
        bad = spoil(payload)
    with pytest.raises(WireError, match="not base64"):
        read(bad, SPEC)


BAD_DICTS: list[tuple[str, dict[str, Any]]] = [
    ("shape", {"shape": [2, 4]}),
    ("shape", {"shape": [2, 4, 2, 1]}),
    ("shape", {"shape": "2x4x2"}),
    ("shape", {"shape": [2, 4, 2.0]}),
    ("shape", {"shape": [True, 8, 2]}),
    ("shape", {"shape": [-2, -4, 2]}),
    ("shape", {"shape": [10**30, 4, 2]}),
    ("shape", {"shape": None}),
    ("data", {"shape": [3, 4, 2]}),
    ("data", {"shape": [10**12, 4, 2]}),
    ("data", {"dtype": "int16"}),
    ("data", {"data": b64(packed("B", ENGINE[:-1]))}),
    ("data", {"data": b64(packed("B", [*ENGINE, 0]))}),
    ("data", {"data": b64(packed("B", [*ENGINE[:-1], 8]))}),
    ("data", {"data": b64(packed("B", [*ENGINE[:-2], 7, 7]))}),
    ("data", {"data": b64(packed("h", [*ENGINE[:-1], -1])), "dtype": "int16"}),
    ("data", {"data": b64(packed("h", [-1, *ENGINE[1:]])), "dtype": "int16"}),  # in the dense layer
    ("dtype", {"dtype": "float32"}),
    ("dtype", {"dtype": "int64"}),
    ("dtype", {"dtype": "object"}),
    ("dtype", {"dtype": 1}),
    ("extra", {"extra": 1}),
]


@pytest.mark.parametrize(("field", "change"), BAD_DICTS)
@pytest.mark.parametrize("peer", ["prime_rl", "dynamo", "skyrl"])
def test_bad_field_of_an_object(peer: str, field: str, change: dict[str, Any]) -> None:
    read, _, payload = PAYLOADS[peer]
    with pytest.raises(WireError, match=field):
        read(payload | change, SPEC)
    if all(not isinstance(value, bytes) for value in change.values()):
        with pytest.raises(WireError, match=field):
            read(json.dumps(payload | change), SPEC)


@pytest.mark.parametrize("peer", ["prime_rl", "dynamo", "skyrl"])
def test_absent_field_of_an_object(peer: str) -> None:
    read, _, payload = PAYLOADS[peer]
    for field in payload:
        with pytest.raises(WireError, match=f"`{field}`"):
            read(without(payload, field), SPEC)


@pytest.mark.parametrize("start", [-1, True, 1.5, "0", None, 1 << 63])
def test_bad_start(start: Any) -> None:
    for read in (peers.from_prime_rl, peers.from_dynamo):
        with pytest.raises(WireError, match="start"):
            read(prime(start=start), SPEC)


def test_skyrl_refuses_what_skyrl_refuses() -> None:
    with pytest.raises(WireError, match="dtype"):
        peers.from_skyrl(skyrl(dtype="uint16", data=b64(packed("H", ENGINE))), SPEC)


@pytest.mark.parametrize("peer", ["prime_rl", "dynamo", "skyrl"])
@pytest.mark.parametrize(
    "bad", ["", "{", "[]", "7", b"\xff\xfe", "\ud800", "[" * 100_000, '{"a":' * 100_000, [], None, 7, {1: 2}, object()]
)
def test_objects_that_are_none(peer: str, bad: Any) -> None:
    with pytest.raises(WireError):
        PAYLOADS[peer][0](bad, SPEC)
    with pytest.raises(WireError):
        peers.peer_start(bad)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("not a .npy", b64(b"")),
        ("not a .npy", b64(b"PK\x03\x04" + bytes(100))),
        ("version", b64(b"\x93NUMPY\x03\x00" + bytes(100))),
        ("version", b64(b"\x93NUMPY")),
        ("header", b64(b"\x93NUMPY\x01\x00")),
        ("header", b64(b"\x93NUMPY\x01\x00\xff\xff" + bytes(20))),
        ("header", b64(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(20))),
        ("header", b64(b"\x93NUMPY\x01\x00\x10\x00" + b"{" * 15 + b"\n")),
        ("header", npy(packed("B", ENGINE), shape="(-2, 4, 2)")),
        ("header", npy(packed("B", ENGINE), shape="(" + "9" * 1000 + ",)")),
        ("header", npy(packed("B", ENGINE), shape="(" + "1" * 3000 + "x)")),  # must not backtrack for ever
        ("header", npy(packed("B", ENGINE), shape="__import__('os')")),
        ("header", npy(packed("B", ENGINE), descr="|O")),
        ("header", npy(packed("B", ENGINE), pad=5000)),
        ("dtype", npy(packed("B", ENGINE), descr="|O8")),
        ("dtype", npy(packed("B", ENGINE), descr="|b1")),
        ("dtype", npy(packed("f", [0.0] * 16), descr="<f4")),
        ("dtype", npy(packed("B", ENGINE), descr="<u3")),
        ("shape", npy(packed("B", ENGINE), shape="(8, 2)")),
        ("shape", npy(packed("B", ENGINE), shape="()")),
        ("shape", npy(packed("B", ENGINE), shape="(1, 2, 4, 2)")),
        ("shape", npy(b"", shape="(0, 999999999999999999, 999999999999999999)")),
        ("data", npy(packed("B", ENGINE), shape="(1000000000000, 4, 2)")),
        ("data", npy(packed("B", ENGINE[:-1]))),
        ("data", npy(packed("B", [*ENGINE, 0]))),
        ("row 1, layer 3", npy(packed("B", [*ENGINE[:-1], 8]))),
        ("row 1, layer 3", npy(packed("b", [*ENGINE[:-1], -1]), "|i1")),
        ("row 0, layer 0", npy(packed("b", [-1, *ENGINE[1:]]), "|i1")),
        ("slots", npy(packed("B", ENGINE), shape="(4, 4, 1)")),
    ],
)
def test_bad_npy(message: str, text: str) -> None:
    with pytest.raises(WireError, match=f"routed_experts.*{message}"):
        peers.from_vllm(text, SPEC)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("row 1, layer 3", b64(packed("i", [*ENGINE[:-1], -1]))),
        ("row 0, layer 0", b64(packed("i", [-1, *ENGINE[1:]]))),
        ("row 1, layer 3", b64(packed("i", [*ENGINE[:-1], 8]))),
        ("row 1, layer 3", b64(packed("i", [*ENGINE[:-1], 258]))),
        ("repeat", b64(packed("i", [*ENGINE[:-2], 7, 7]))),
        ("63 bytes", b64(packed("i", ENGINE)[:-1])),
        ("68 bytes", b64(packed("i", [*ENGINE, 0]))),
    ],
)
def test_bad_sglang(message: str, text: str) -> None:
    with pytest.raises(WireError, match=f"routed_experts.*{message}"):
        peers.from_sglang(text, SPEC)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("text", ""),
        ("text", "nrlre2:int8:2x4x2:AAAA"),
        ("text", "nrlre1:int8:2x4x2"),
        ("text", b"\xff" * 200),
        ("text", "x" * 200),
        ("dtype", nemo(ENGINE, "uint8")),
        ("dtype", nemo(ENGINE, "float32")),
        ("dtype", nemo(ENGINE, "")),
        ("shape", nemo(ENGINE, shape="2x8")),
        ("shape", nemo(ENGINE, shape="2x4x2x1")),
        ("shape", nemo(ENGINE, shape="-2x-4x2")),
        ("shape", nemo(ENGINE, shape="2x4x")),
        ("shape", nemo(ENGINE, shape="٢x4x2")),
        ("shape", nemo(ENGINE, shape="2x4x" + "2" * 25)),
        ("data", nemo(ENGINE, shape="1000000000000x4x2")),
        ("data", nemo(ENGINE, "int16")),
        ("data", nemo(ENGINE[:-1])),
        ("data", nemo([*ENGINE, 0])),
        ("data: row 1, layer 3", nemo([*ENGINE[:-1], 8])),
        ("data: row 1, layer 3", nemo([*ENGINE[:-1], -2])),
        ("data: row 1, layer 3", nemo([*ENGINE[:-2], 7, 7])),
        ("slots", nemo([-1] * 16, shape="4x4x1")),
        ("slots", nemo([-1] * 48, shape="1x4x12")),
    ],
)
def test_bad_nemo(field: str, text: Any) -> None:
    with pytest.raises(WireError, match=field):
        peers.from_nemo(text, SPEC)


@pytest.mark.parametrize("peer", PAYLOADS)
def test_a_claim_of_a_trillion_rows_allocates_nothing(peer: str) -> None:
    payload = {
        "vllm": npy(b"", shape="(1000000000000, 4, 2)"),
        "sglang": b64(bytes(31)),  # no claim can be made; a broken row is the nearest
        "prime_rl": prime(shape=[10**12, 4, 2]),
        "dynamo": prime(shape=[10**12, 4, 2]),
        "skyrl": skyrl(shape=[10**12, 4, 2]),
        "nemo": nemo([], shape="1000000000000x4x2"),
    }[peer]
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            PAYLOADS[peer][0](payload, SPEC)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- properties ---------------------------------------------------------------------------------


@st.composite
def some_routes(draw: st.DrawFn) -> Routes:
    experts = draw(st.sampled_from([2, 8, 127, 128, 129, 256, 257, 512, 40_000, 65_536]))
    top_k = draw(st.integers(1, min(experts, 5)))
    layers = sorted(draw(st.sets(st.integers(0, 6), min_size=1)))
    num_layers = draw(st.sampled_from([None, layers[-1] + 1, layers[-1] + 3]))
    spec = RouterSpec(num_experts=experts, top_k=top_k, layers=tuple(layers), num_layers=num_layers)
    rows = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = [[rng.choice(experts, top_k, replace=False) for _ in layers] for _ in range(rows)]
    captured = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
    return Routes(np.array(ids, int).reshape(rows, len(layers), top_k), spec, captured=captured)


@pytest.mark.parametrize("peer", PAYLOADS)
@given(routes=some_routes())
@settings(deadline=None, max_examples=60)
def test_round_trip(peer: str, routes: Routes) -> None:
    read, write, _ = PAYLOADS[peer]
    if peer != "nemo" and not routes.all_captured:
        with pytest.raises(WireError, match=f"row {routes.first_missing} "):
            write(routes)
        routes = Routes.concat([routes[:0], routes[: routes.first_missing]])
    payload = write(routes)
    again = read(payload, routes.spec, allow_zero_layers=True)  # top-1 rows may all be expert 0
    assert again == routes
    assert again.ids.dtype == routes.spec.dtype
    assert not again.ids.flags.writeable
    if isinstance(payload, dict):
        assert read(json.dumps(payload), routes.spec, allow_zero_layers=True) == routes


@pytest.mark.parametrize("peer", PAYLOADS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_nothing_but_wire_error_leaves_mutated_input(peer: str, data: st.DataObject) -> None:
    read, _, payload = PAYLOADS[peer]
    raw = bytearray(json.dumps(payload).encode() if isinstance(payload, dict) else payload.encode())
    inner = peer == "vllm" and data.draw(st.booleans())  # under the base64, where the header is
    if inner:
        raw = bytearray(base64.b64decode(bytes(raw)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        raw = raw or bytearray(b"x")
    try:
        routes = read(base64.b64encode(bytes(raw)) if inner else bytes(raw), SPEC)
    except WireError:
        return
    assert routes.spec == SPEC
    assert routes.ids.shape[1:] == (3, 2)
