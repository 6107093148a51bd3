"""Peers that send one text: vLLM's .npy, SGLang's bare int32 and NeMo RL's string with its missing rows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire import peers
from tests.wire.payloads import ENGINE, ROWS, SHAPE, SPEC, b64, nemo, npy, packed

# -- vLLM ---------------------------------------------------------------------------------------


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


# -- SGLang -------------------------------------------------------------------------------------


def test_sglang_asks_for_num_layers_where_the_bytes_do_not_divide() -> None:
    text = b64(packed("i", [0] * 10))
    with pytest.raises(WireError, match=r"routed_experts.*pass num_layers"):
        peers.from_sglang(text, RouterSpec(num_experts=8, top_k=2, layers=(1, 2)))
    with pytest.raises(WireError, match="whole rows of 32 bytes \\(4 layers x 2 int32\\), got 40") as info:
        peers.from_sglang(text, SPEC)
    assert "pass num_layers" not in str(info.value)


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


# -- NeMo RL ------------------------------------------------------------------------------------


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
    few = peers.from_nemo(nemo([-1, -1, *[3, 0] * 63], shape="64x2x1"), spec)  # 63 captured rows may be expert 0
    assert few.captured.tolist() == [False] + [True] * 63
    with pytest.raises(WireError, match=r"layers \[1\] hold only zeros in all 64 rows"):
        peers.from_nemo(nemo([-1, -1, *[3, 0] * 64], shape="65x2x1"), spec)


@pytest.mark.parametrize("place", [8, 9, 10, 15])
def test_nemo_refuses_a_row_that_is_partly_missing(place: int) -> None:
    values = list(ENGINE)
    values[place] = -1
    with pytest.raises(WireError, match=rf"data: row 1 has -1 \(missing\) in layer {(place - 8) // 2}, expected"):
        peers.from_nemo(nemo(values), SPEC)


def test_nemo_keeps_the_row_of_an_error_after_missing_rows() -> None:
    with pytest.raises(WireError, match="row 1, layer 1: experts \\[3, 3\\]"):
        peers.from_nemo(nemo([*[-1] * 8, 0, 0, 3, 3, 0, 1, 7, 2]), SPEC)
    with pytest.raises(WireError, match="expected an expert id of 0 or more, got -2"):
        peers.from_nemo(nemo([*[-1] * 8, 0, 0, 3, -2, 0, 1, 7, 2]), SPEC)


def test_nemo_chooses_the_dtype_from_the_number_of_experts() -> None:
    for experts, dtype in ((128, "int8"), (129, "int16"), (32768, "int16"), (32769, "int32")):
        spec = RouterSpec(num_experts=experts, top_k=1, layers=(0,))
        text = peers.to_nemo(Routes([[[experts - 1]]], spec))
        assert text.startswith(f"nrlre1:{dtype}:1x1x1:")
        assert peers.from_nemo(text, spec).ids.tolist() == [[[experts - 1]]]


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
