"""vLLM over HTTP: `choices[i].routed_experts` is base64 of a `.npy` file over all decoder layers."""

from __future__ import annotations

import io
import re

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

_PLACE = "vLLM routed_experts"
# The header as every version of NumPy writes it. NumPy's reader evaluates it as Python code, which is not safe for
# bytes from outside. A dimension has at most 18 digits, so that no number is costly to convert.
_HEADER = re.compile(
    rb"\{'descr': '([<>|][a-zA-Z]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}(?:, \d{1,18}){0,31},?)?)\), ?\} *\n"
)
_LONGEST_HEADER = 4096


def from_vllm(text: str | bytes, spec: RouterSpec, *, allow_zero_layers: bool = False) -> Routes:
    """Read the `text` of `choices[i].routed_experts` for the model of `spec`.

    `allow_zero_layers` accepts layers whose rows are all expert 0, as in `Routes.from_engine`.
    """
    raw = decode_base64(text, _PLACE)
    dtype, fortran_order, shape, offset = _npy_header(raw)
    array = raw_array(raw, dtype, shape[::-1] if fortran_order else shape, _PLACE, offset=offset)
    return routes_of(array.T if fortran_order else array, spec, _PLACE, allow_zero_layers=allow_zero_layers)


def to_vllm(routes: Routes) -> str:
    """Write `routes` as vLLM's HTTP server does, in `choices[i].routed_experts`."""
    refuse_missing(routes, _PLACE)
    array = all_layers(routes, routes.spec.dtype, _PLACE)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return encode_base64(file.getbuffer())


def _npy_header(raw: bytes) -> tuple[np.dtype, bool, tuple[int, ...], int]:
    """Return (dtype, Fortran order, shape, offset of the data) of a `.npy` file of integers."""
    if raw[:6] != b"\x93NUMPY":
        raise WireError(f"{_PLACE}: not a .npy file: the data starts with {raw[:6]!r}")
    width = {b"\x01\x00": 2, b"\x02\x00": 4}.get(raw[6:8])
    if width is None:
        raise WireError(f"{_PLACE}: .npy version must be 1.0 or 2.0, got {list(raw[6:8])}")
    offset = 8 + width + int.from_bytes(raw[8 : 8 + width], "little")
    if offset > min(len(raw), _LONGEST_HEADER):
        raise WireError(
            f"{_PLACE}: .npy header must end by byte {min(len(raw), _LONGEST_HEADER)}, got byte {offset} of {len(raw)}"
        )
    match = _HEADER.fullmatch(raw, 8 + width, offset)
    if match is None:
        raise WireError(
            f"{_PLACE}: .npy header: expected the form that NumPy writes, got {raw[8 + width : offset][:120]!r}"
        )
    descr, order, dimensions = (group.decode("ascii") for group in match.groups())
    if descr[1:] not in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"):
        raise WireError(f"{_PLACE}: dtype must be an integer of 1, 2, 4 or 8 bytes, got {descr!r}")
    shape = tuple(int(number) for number in re.findall(r"\d+", dimensions))
    return np.dtype(descr), order == "True", shape, offset
