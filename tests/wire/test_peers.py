"""What all peers' formats share: payloads written by hand, dtypes without truncation, the layout, and round trips."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire import peers
from tests.wire.payloads import PAYLOADS, ROWS, SPEC, WIDE, b64, nemo, npy, packed, prime, skyrl

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


@pytest.mark.parametrize("peer", [peer for peer in PAYLOADS if peer != "nemo"])
def test_a_missing_row_cannot_be_written(peer: str) -> None:
    with pytest.raises(WireError, match="row 1 is not captured"):
        PAYLOADS[peer][1](Routes(ROWS, SPEC, captured=[True, False]))


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


# -- the layout is never guessed ----------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [4, None])
@pytest.mark.parametrize("peer", [peer for peer in PAYLOADS if peer != "megatron"])  # which has no others
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


@pytest.mark.parametrize("peer", PAYLOADS)
def test_a_layer_that_was_never_recorded_is_refused_unless_the_caller_knows_better(peer: str) -> None:
    spec = RouterSpec(num_experts=8, top_k=1, layers=(0, 1))
    read, write, _ = PAYLOADS[peer]
    rows = Routes([[[3], [0]], [[4], [0]]] * 32, spec)
    with pytest.raises(WireError, match=r"layers \[1\] hold only zeros in all 64 rows"):
        read(write(rows), spec)
    assert read(write(rows), spec, allow_zero_layers=True) == rows
    assert read(write(rows[1:]), spec) == rows[1:]  # 63 rows may well be expert 0


@pytest.mark.parametrize("peer", PAYLOADS)
def test_two_routers_in_one_layer_have_no_place(peer: str) -> None:
    read, write, payload = PAYLOADS[peer]
    spec = RouterSpec(num_experts=8, top_k=2, layers=(1, 1, 3), num_layers=4)
    with pytest.raises(WireError, match="layer 1 has two routers"):
        write(Routes(ROWS, spec))
    with pytest.raises(WireError, match="layer 1 has two routers"):
        read(payload, spec)


# -- round trips --------------------------------------------------------------------------------


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
    again = read(payload, routes.spec)
    assert again == routes
    assert again.ids.dtype == routes.spec.dtype
    assert not again.ids.flags.writeable
    if isinstance(payload, dict):
        assert read(json.dumps(payload), routes.spec) == routes
