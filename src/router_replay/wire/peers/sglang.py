"""SGLang: `meta_info.routed_experts` is base64 of raw little-endian int32 over all decoder layers.

There is no header: the number of layers of a row is taken from the spec and never inferred from the data.
"""

from __future__ import annotations

import numpy as np

from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire.peers.common import (
    all_layers,
    decode_base64,
    encode_base64,
    raw_array,
    refuse_missing,
    routes_of,
)

_PLACE = "SGLang routed_experts"
_INT32 = np.dtype("<i4")


def from_sglang(text: str | bytes, spec: RouterSpec, *, allow_zero_layers: bool = False) -> Routes:
    """Read the `text` of `meta_info.routed_experts` (or `sglext.routed_experts`) for the model of `spec`.

    `allow_zero_layers` accepts layers whose rows are all expert 0, as in `Routes.from_engine`.
    """
    raw = decode_base64(text, _PLACE)
    row_bytes = spec.engine_layers * spec.top_k * _INT32.itemsize
    rows, rest = divmod(len(raw), row_bytes)
    if rest:
        hint = ""
        if spec.num_layers is None:
            hint = (
                f"; the spec has no num_layers, so {spec.engine_layers} decoder layers were assumed (up to the last "
                "routed one): pass num_layers to RouterSpec"
            )
        raise WireError(
            f"{_PLACE}: expected whole rows of {row_bytes} bytes ({spec.engine_layers} layers x {spec.top_k} int32), "
            f"got {len(raw)} bytes{hint}"
        )
    array = raw_array(raw, _INT32, (rows, spec.engine_layers, spec.top_k), _PLACE)
    return routes_of(array, spec, _PLACE, allow_zero_layers=allow_zero_layers)


def to_sglang(routes: Routes) -> str:
    """Write `routes` as SGLang's `meta_info.routed_experts`."""
    refuse_missing(routes, _PLACE)
    return encode_base64(all_layers(routes, _INT32, _PLACE))
