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
    """Read prime-rl's object, as a dict or as JSON; `peer_start(obj)` says where its rows begin.

    With `prompt_length`, a start beyond the prompt raises. `allow_zero_layers` is Routes.from_engine's.
    """
    return _read(_payload(obj, "prime-rl"), spec, prompt_length, allow_zero_layers, "prime-rl")


def from_dynamo(
    obj: dict[str, Any] | str | bytes,
    spec: RouterSpec,
    *,
    prompt_length: int | None = None,
    allow_zero_layers: bool = False,
) -> Routes:
    """Read Dynamo's `nvext.routed_experts`, or the whole response that holds it.

    With `prompt_length`, a start beyond the prompt raises. `allow_zero_layers` is Routes.from_engine's.
    """
    return _read(_payload(obj, "Dynamo"), spec, prompt_length, allow_zero_layers, "Dynamo")


def peer_start(obj: dict[str, Any] | str | bytes) -> int:
    """The position of the first row of a prime-rl or Dynamo object: what to give to Trajectory.append."""
    return _payload(obj, "prime-rl / Dynamo").start


def to_prime_rl(routes: Routes, start: int = 0) -> dict[str, Any]:
    """Write rows as prime-rl does; the dtype is the model's, so that all turns of a sample agree."""
    return _write(routes, start, "prime-rl")


def to_dynamo(routes: Routes, start: int = 0) -> dict[str, Any]:
    """Write rows as Dynamo's `nvext.routed_experts`."""
    return _write(routes, start, "Dynamo")


def _payload(obj: Any, peer: str) -> _Payload:
    value = parse_json(obj, peer)
    if isinstance(value, dict) and "nvext" in value and peer != "prime-rl":
        nvext = value["nvext"]
        if not isinstance(nvext, dict) or "routed_experts" not in nvext:
            raise WireError(
                f"{peer} nvext.routed_experts: absent from the response; ask for it by "
                'nvext.extra_fields: ["routed_experts"]'
            )
        value = nvext["routed_experts"]
        if isinstance(value, str):
            raise WireError(
                f"{peer} nvext.routed_experts: text instead of an object: this Dynamo stands in front of SGLang; "
                "give the text to from_sglang"
            )
    return parse(value, _Payload, peer)


def _read(payload: _Payload, spec: RouterSpec, prompt_length: int | None, allow_zero_layers: bool, peer: str) -> Routes:
    if prompt_length is not None and payload.start > exact_int(prompt_length, f"{peer} prompt_length", WireError):
        raise WireError(f"{peer} start: {payload.start} lies beyond the prompt of {prompt_length} tokens")
    raw = decode_base64(payload.data, f"{peer} data")
    array = raw_array(raw, np.dtype(payload.dtype).newbyteorder("<"), payload.shape, peer)
    return routes_of(array, spec, f"{peer} data", allow_zero_layers=allow_zero_layers)


def _write(routes: Routes, start: int, peer: str) -> dict[str, Any]:
    start = exact_int(start, f"{peer} start", WireError)
    refuse_missing(routes, f"{peer} data")
    array = all_layers(routes, routes.spec.dtype.newbyteorder("<"), f"{peer} data")
    return {"data": encode_base64(array), "shape": list(array.shape), "start": start, "dtype": array.dtype.name}
