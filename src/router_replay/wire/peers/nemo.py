"""NeMo RL: one text, `nrlre1:<dtype>:<rows>x<layers>x<slots>:<base64>`, signed, where -1 means missing.

nrlre1:int8:2x1x2:AQL//w==      row 0 used experts 1 and 2; row 1 was not captured
"""

from __future__ import annotations

import re

import numpy as np

from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire.peers.common import all_layers, decode_base64, encode_base64, raw_array, routes_of

_PLACE = "NeMo RL data"
_DTYPES: dict[str, np.dtype] = {"int8": np.dtype("i1"), "int16": np.dtype("<i2"), "int32": np.dtype("<i4")}
_SHAPE = re.compile(r"(\d{1,18})x(\d{1,18})x(\d{1,18})", re.ASCII)
_LONGEST_HEAD = 80


def from_nemo(text: str | bytes, spec: RouterSpec, *, allow_zero_layers: bool = False) -> Routes:
    """Read the `text` of NeMo RL for the model of `spec`.

    A row that is -1 in every layer and slot is uncaptured. A row that is -1 in some of them raises WireError.
    `allow_zero_layers` accepts layers whose rows are all expert 0, as in `Routes.from_engine`.
    """
    dtype, shape, data = _split(text)
    array_TAK = raw_array(decode_base64(data, _PLACE), dtype, shape, "NeMo RL")
    if not array_TAK.size or array_TAK.min() >= 0:
        return routes_of(array_TAK, spec, _PLACE, allow_zero_layers=allow_zero_layers)
    absent_TAK = array_TAK == -1
    captured = ~absent_TAK.all(axis=(1, 2))
    partly = captured & absent_TAK.any(axis=(1, 2))
    if partly.any():
        row = int(np.argmax(partly))
        layer = int(np.argmax(absent_TAK[row].any(axis=1)))
        raise WireError(
            f"{_PLACE}: row {row} has -1 (missing) in layer {layer}, expected it in every layer and slot or in none"
        )
    filled_TAK = array_TAK.copy()
    filled_TAK[~captured] = 0
    return routes_of(filled_TAK, spec, _PLACE, allow_zero_layers=allow_zero_layers, captured=captured)


def to_nemo(routes: Routes) -> str:
    """Write `routes` as NeMo RL does: -1 in every layer of an uncaptured row.

    The dtype is the narrowest signed one that holds the model's expert ids.
    """
    experts = routes.spec.num_experts
    name = "int8" if experts <= 1 << 7 else "int16" if experts <= 1 << 15 else "int32"
    array_TAK = all_layers(routes, _DTYPES[name], _PLACE)  # another dtype than the ids, so this is a copy
    if not routes.all_captured:
        array_TAK[~routes.captured] = -1
    rows, layers, slots = array_TAK.shape
    return f"nrlre1:{name}:{rows}x{layers}x{slots}:{encode_base64(array_TAK)}"


def _split(text: str | bytes) -> tuple[np.dtype, tuple[int, int, int], memoryview | str]:
    """Return (dtype, shape, base64) of the text; if the text is bytes, the base64 is a view of it."""
    if not isinstance(text, str | bytes):
        raise WireError(f"NeMo RL text: expected nrlre1:<dtype>:SxLxK:<base64>, got {type(text).__name__}")
    head = text[:_LONGEST_HEAD]
    parts = (head if isinstance(head, str) else head.decode("latin-1")).split(":", 3)
    if len(parts) != 4 or parts[0] != "nrlre1":
        raise WireError(f"NeMo RL text: expected nrlre1:<dtype>:SxLxK:<base64>, got {text[:24]!r}")
    if parts[1] not in _DTYPES:
        raise WireError(f"NeMo RL dtype: expected one of {list(_DTYPES)}, got {parts[1]!r}")
    match = _SHAPE.fullmatch(parts[2])
    if match is None:
        raise WireError(f"NeMo RL shape: expected SxLxK, got {parts[2]!r}")
    start = sum(len(part) + 1 for part in parts[:3])
    data = text[start:] if isinstance(text, str) else memoryview(text)[start:]
    rows, layers, slots = (int(number) for number in match.groups())
    return _DTYPES[parts[1]], (rows, layers, slots), data
