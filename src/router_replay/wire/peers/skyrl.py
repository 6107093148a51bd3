"""SkyRL: `routed_experts` of `/skyrl/v1/generate` is raw base64, its shape, and one of three dtypes.

{"data": "BQA...", "shape": [3, 48, 8], "dtype": "uint8"}
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

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
    data: Any  # text or bytes: SkyRL's client keeps the base64 as a view of the response
    shape: tuple[Count, Count, Count]
    dtype: Literal["uint8", "int16", "int32"]


def from_skyrl(obj: dict[str, Any] | str | bytes, spec: RouterSpec, *, allow_zero_layers: bool = False) -> Routes:
    """Read SkyRL's object `obj`, a dict or JSON, for the model of `spec`.

    The ids are converted to the spec's dtype; SkyRL's depends on the values. `allow_zero_layers` accepts layers whose
    rows are all expert 0, as in `Routes.from_engine`.
    """
    payload = parse(parse_json(obj, "SkyRL"), _Payload, "SkyRL")
    raw = decode_base64(payload.data, "SkyRL data")
    array = raw_array(raw, np.dtype(payload.dtype).newbyteorder("<"), payload.shape, "SkyRL")
    return routes_of(array, spec, "SkyRL data", allow_zero_layers=allow_zero_layers)


def to_skyrl(routes: Routes) -> dict[str, Any]:
    """Write `routes` as SkyRL does, in the narrowest of its dtypes that holds the values: SkyRL refuses any other."""
    refuse_missing(routes, "SkyRL data")
    largest = int(routes.ids.max(initial=0))
    dtype = np.dtype("u1" if largest < 1 << 8 else "<i2" if largest < 1 << 15 else "<i4")
    array = all_layers(routes, dtype, "SkyRL data")
    return {"data": encode_base64(array), "shape": list(array.shape), "dtype": array.dtype.name}
