"""Functions that all formats use: base64, raw arrays of a given shape, and columns for all layers.

Shapes: T rows (tokens), A all decoder layers, L routed layers, K slots (top_k).
A `place` is the project and its field, such as "prime-rl data"; every error message begins with it.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from router_replay.errors import RoutesError, WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


def decode_base64(text: Any, place: str) -> bytes:
    """Return the bytes of canonical base64: one alphabet, no white space, exact padding, no bits set after the data."""
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise WireError(f"{place}: expected base64 text, got {type(text).__name__}")
    try:
        if isinstance(text, memoryview):
            text = text.cast("B") if text.nbytes else b""  # an empty view cannot be cast
        raw = binascii.a2b_base64(text, strict_mode=True)
        tail = bytes(text[-4:], "ascii") if isinstance(text, str) else bytes(text[-4:])
    except (ValueError, TypeError, BufferError) as error:
        raise WireError(f"{place}: not base64: {error}") from error
    # Python's strict mode still accepts surplus padding, and bits that are set after the data.
    last = raw[len(raw) - (len(raw) % 3 or 3) :] if raw else b""
    if tail != binascii.b2a_base64(last, newline=False):
        raise WireError(f"{place}: not base64: the end of {len(text)} characters does not encode {len(raw)} bytes")
    return raw


def encode_base64(data: Any) -> str:
    """Return the base64 of a bytes-like object as text, without line ends."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def parse(value: Any, kind: type[T], peer: str) -> T:
    """Convert a dict to an object of the type `kind`; raise WireError with the field if it does not fit."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{peer} routed experts: {error}") from error


def parse_json(value: Any, peer: str) -> Any:
    """Parse JSON text or bytes; return any other value unchanged, since it is parsed already."""
    if not isinstance(value, str | bytes | bytearray | memoryview):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, TypeError, BufferError, RecursionError) as error:
        raise WireError(f"{peer} routed experts: not JSON: {error}") from error


def raw_array(raw: bytes, dtype: np.dtype, shape: Sequence[int], peer: str, *, offset: int = 0) -> np.ndarray:
    """Return a view of `raw` from `offset` on as [T, A, K]; raise WireError if the shape does not fit the bytes."""
    if len(shape) != 3 or min(shape) < 0:
        raise WireError(f"{peer} shape: expected [rows, all decoder layers, slots], got {list(shape)}")
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) - offset != expected:
        raise WireError(
            f"{peer} data: expected {expected} bytes for shape {list(shape)} of {dtype.name}, got {len(raw) - offset}"
        )
    try:
        return np.frombuffer(raw, dtype, offset=offset, count=math.prod(shape)).reshape(shape)
    except (ValueError, OverflowError) as error:  # an empty array with a dimension that is too large for NumPy
        raise WireError(f"{peer} shape: {list(shape)}: {error}") from error


def routes_of(
    array_TAK: np.ndarray,
    spec: RouterSpec,
    place: str,
    *,
    allow_zero_layers: bool = False,
    captured: np.ndarray | None = None,
) -> Routes:
    """Return the routed layers of an array over all decoder layers, checked and in the spec's dtype.

    Rows that are not `captured` must hold zeros.
    """
    one_router_per_layer(spec, place)
    if array_TAK.dtype.kind == "i" and array_TAK.size and array_TAK.min() < 0:
        # The columns of dense layers are dropped below without a check, so negative ids are refused here.
        row, layer, slot = np.argwhere(array_TAK < 0)[0].tolist()
        value = array_TAK[row, layer, slot]
        raise WireError(
            f"{place}: row {row}, layer {layer}, slot {slot}: expected an expert id of 0 or more, got {value}"
        )
    try:
        return Routes._from_engine(array_TAK, spec, allow_zero_layers, captured)
    except RoutesError as error:
        raise WireError(f"{place}: {error}") from error


def all_layers(routes: Routes, dtype: np.dtype, place: str) -> np.ndarray:
    """Return the rows as an engine returns them, [T, A, K], with zeros in dense layers; copied only if necessary."""
    spec = routes.spec
    one_router_per_layer(spec, place)
    if spec.layers == tuple(range(spec.engine_layers)):
        return np.ascontiguousarray(routes.ids, dtype)
    array_TAK = np.zeros((len(routes), spec.engine_layers, spec.top_k), dtype)
    array_TAK[:, list(spec.layers)] = routes.ids
    return array_TAK


def refuse_missing(routes: Routes, place: str) -> None:
    """Raise WireError if a row is not captured, for formats that cannot mark missing rows."""
    if not routes.all_captured:
        raise WireError(
            f"{place}: row {routes.first_missing} is not captured, and this format cannot mark missing rows; "
            "write only the rows before it, or use wire.encode"
        )


def one_router_per_layer(spec: RouterSpec, place: str) -> None:
    """Raise WireError if a layer has two routers: the formats have one column per layer."""
    twice = [a for a, b in zip(spec.layers, spec.layers[1:], strict=False) if a == b]
    if twice:
        raise WireError(
            f"{place}: layer {twice[0]} has two routers, but this format has one column per layer; use wire.encode"
        )
