"""Payloads of every peer's format, written by hand, for the tests of the peers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

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


PAYLOADS: dict[str, tuple[Callable[..., Routes], Callable[..., Any], Any]] = {
    "vllm": (peers.from_vllm, peers.to_vllm, npy(packed("B", ENGINE))),
    "sglang": (peers.from_sglang, peers.to_sglang, b64(packed("i", ENGINE))),
    "prime_rl": (peers.from_prime_rl, peers.to_prime_rl, prime()),
    "dynamo": (peers.from_dynamo, peers.to_dynamo, prime()),
    "skyrl": (peers.from_skyrl, peers.to_skyrl, skyrl()),
    "nemo": (peers.from_nemo, peers.to_nemo, nemo(ENGINE)),
    "megatron": (peers.from_megatron, peers.to_megatron, {"moe_topk_indices": ROWS}),
}
IN_BASE64 = [peer for peer in PAYLOADS if peer != "megatron"]  # which writes lists of numbers
