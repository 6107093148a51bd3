"""Bad input that any peer may send: careless base64, huge claims and mutated bytes end in a WireError, and cheaply."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_replay.errors import WireError
from tests.wire.payloads import IN_BASE64, PAYLOADS, SPEC, b64, nemo, npy, prime, skyrl

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
@pytest.mark.parametrize("peer", IN_BASE64)
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
@pytest.mark.parametrize("peer", IN_BASE64)
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


@pytest.mark.parametrize("peer", IN_BASE64)
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
