"""prime-rl and Dynamo: one object of raw base64, its shape, and the position of its first row.

    {"data": "BQA...", "shape": [3, 48, 8], "start": 120, "dtype": "uint8"}

Dynamo in front of vLLM sends the same object as `nvext.routed_experts` of its response.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from router_replay.arguments import exact_int
from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire.peers.common import (
    Count,
    all_layers,
    decode_base64,
    encode_base64,
    parse,
    parse_json,
    raw_array,
    refuse_missing,
    routes_of,
)


class _Payload(msgspec.Struct, forbid_unknown_fields=True):
    data: Any  # text or bytes: some clients keep the base64 as a view of the response
    shape: tuple[Count, Count, Count]
    start: Count
    dtype: Literal["uint8", "uint16", "int16", "int32"]


def from_prime_rl(
    obj: dict[str, Any] | str | bytes,
    spec: RouterSpec,
    *,
    prompt_length: int | None = None,
    allow_zero_layers: bool = False,
) -> Routes:
    """Read prime-rl's object `obj`, a dict or JSON, for the model of `spec`.

    `peer_start(obj)` returns the position of its first row. With `prompt_length`, a start beyond the prompt raises
    WireError. `allow_zero_layers` accepts layers whose rows are all expert 0, as in `Routes.from_engine`.
    """
    return _read(_payload(obj, "prime-rl"), spec, prompt_length, allow_zero_layers, "prime-rl")


def from_dynamo(
    obj: dict[str, Any] | str | bytes,
    spec: RouterSpec,
    *,
    prompt_length: int | None = None,
    allow_zero_layers: bool = False,
) -> Routes:
    """Read `obj`, Dynamo's `nvext.routed_experts` or the whole response with it, for the model of `spec`.

    `obj` is a dict or JSON. With `prompt_length`, a start beyond the prompt raises WireError. `allow_zero_layers`
    accepts layers whose rows are all expert 0, as in `Routes.from_engine`.
    """
    return _read(_payload(obj, "Dynamo"), spec, prompt_length, allow_zero_layers, "Dynamo")


def peer_start(obj: dict[str, Any] | str | bytes) -> int:
    """Return the position of the first row of `obj`, a prime-rl or Dynamo object: the `start` of Trajectory.append."""
    return _payload(obj, "prime-rl / Dynamo").start


def to_prime_rl(routes: Routes, start: int = 0) -> dict[str, Any]:
    """Write `routes` as prime-rl does; `start` is the position of their first row.

    The dtype depends on the model and not on the values, so all turns of a sample have the same one.
    """
    return _write(routes, start, "prime-rl")


def to_dynamo(routes: Routes, start: int = 0) -> dict[str, Any]:
    """Write `routes` as Dynamo's `nvext.routed_experts`; `start` is the position of their first row."""
    return _write(routes, start, "Dynamo")


def _payload(obj: Any, peer: str) -> _Payload:
    value = parse_json(obj, peer)
    if isinstance(value, dict) and "nvext" in value and peer != "prime-rl":
        nvext = value["nvext"]
        if not isinstance(nvext, dict) or "routed_experts" not in nvext:
            raise WireError(
                f"{peer} nvext.routed_experts: not in the response; request it with "
                'nvext.extra_fields: ["routed_experts"]'
            )
        value = nvext["routed_experts"]
        if isinstance(value, str):
            raise WireError(
                f"{peer} nvext.routed_experts: expected an object, got text: this Dynamo is in front of SGLang; "
                "pass the text to from_sglang"
            )
    return parse(value, _Payload, peer)


def _read(payload: _Payload, spec: RouterSpec, prompt_length: int | None, allow_zero_layers: bool, peer: str) -> Routes:
    if prompt_length is not None and payload.start > exact_int(prompt_length, f"{peer} prompt_length", WireError):
        raise WireError(f"{peer} start: expected at most prompt_length={prompt_length}, got {payload.start}")
    raw = decode_base64(payload.data, f"{peer} data")
    array = raw_array(raw, np.dtype(payload.dtype).newbyteorder("<"), payload.shape, peer)
    return routes_of(array, spec, f"{peer} data", allow_zero_layers=allow_zero_layers)


def _write(routes: Routes, start: int, peer: str) -> dict[str, Any]:
    start = exact_int(start, f"{peer} start", WireError)
    refuse_missing(routes, f"{peer} data")
    array = all_layers(routes, routes.spec.dtype.newbyteorder("<"), f"{peer} data")
    return {"data": encode_base64(array), "shape": list(array.shape), "start": start, "dtype": array.dtype.name}
