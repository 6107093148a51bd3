"""Peers that send a JSON object: prime-rl, Dynamo and SkyRL, field by field."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from router_replay import wire
from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire import peers
from tests.wire.blobs import random_routes, spec_of
from tests.wire.payloads import ENGINE, PAYLOADS, ROWS, SPEC, WIDE, b64, packed, prime, skyrl

# -- what peers really send ---------------------------------------------------------------------


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
        with pytest.raises(WireError, match="start: expected at most prompt_length=6, got 7"):
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


def test_skyrl_gets_the_only_dtype_it_takes_for_the_values() -> None:
    for value, experts, dtype in ((255, 512, "uint8"), (256, 512, "int16"), (32768, 65536, "int32")):
        spec = RouterSpec(num_experts=experts, top_k=1, layers=(0,))
        payload = peers.to_skyrl(Routes([[[value]]], spec))
        assert payload["dtype"] == dtype
        assert peers.from_skyrl(payload, spec).ids.tolist() == [[[value]]]


def test_prime_rl_gets_the_models_dtype_whatever_the_values() -> None:
    assert peers.to_prime_rl(Routes([[[1, 2]]], WIDE))["dtype"] == "uint16"


# -- bad input, kind by kind --------------------------------------------------------------------


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


def without(payload: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in payload.items() if key != field}


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


def test_a_start_reaches_to_2_to_the_63_and_no_further() -> None:
    payload = wire.to_prime_rl(random_routes(2, spec_of(8, 2)))
    assert wire.peer_start(payload | {"start": 2**63 - 1}) == 2**63 - 1
    for start in (2**63, 2**63 + 1, 2**64 - 1):
        with pytest.raises(WireError, match="start"):
            wire.peer_start(payload | {"start": start})


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_the_first_negative_id_is_named_by_its_place(dtype: str) -> None:
    array = np.tile(np.array([0, 1], dtype), (3, 2, 1))
    array[1, 1, 0] = array[2, 0, 1] = -7
    data = base64.b64encode(array.tobytes()).decode()
    payload = {"data": data, "shape": [3, 2, 2], "start": 0, "dtype": dtype}
    with pytest.raises(WireError, match="row 1, layer 1, slot 0: expected an expert id of 0 or more, got -7"):
        wire.from_prime_rl(payload, spec_of(8, 2))
