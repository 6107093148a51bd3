"""Codec `dense`: stores the raw narrow ids of all rows, which decode as a view of the blob.

Uncaptured rows are written as zeros, so that equal routes always give equal bytes.

Shapes: T rows, L layers, K slots; N = T * L sets.
"""

from __future__ import annotations

import numpy as np

from router_replay import kernel
from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.runs import Runs
from router_replay.spec import RouterSpec
from router_replay.wire.envelope import CHECKSUM_BYTES, Header, check_sum


def payload_length(header: Header) -> int:
    """Return the number of payload bytes for the rows of the header."""
    return header.rows * header.spec.row_bytes


def encode(routes: Routes) -> np.ndarray:
    """Return the payload: the ids of all rows as little-endian bytes, zeros in uncaptured rows."""
    ids_TLK = routes.ids
    if not routes.all_captured:
        ids_TLK = np.where(routes.captured[:, None, None], ids_TLK, ids_TLK.dtype.type(0))
    little = np.ascontiguousarray(ids_TLK, ids_TLK.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)


def decode(view: memoryview, header: Header, check_rows: bool) -> np.ndarray:
    """Return the ids [T, L, K] as a view, after checking the checksum and, if `check_rows`, every row.

    A wrong checksum is reported first: damage in transit is not the writer's fault.
    """
    spec, offset = header.spec, header.payload_offset
    stored = spec.dtype.newbyteorder("<")
    ids_NK = np.frombuffer(view[offset:-CHECKSUM_BYTES], stored).astype(spec.dtype, copy=False).reshape(-1, spec.top_k)
    ids_TLK = ids_NK.reshape(header.rows, *spec.row_shape)
    if not check_rows:
        check_sum(view)
        return ids_TLK
    if header.captured_rows == header.rows:
        data = view[:-CHECKSUM_BYTES]
        computed, bad = kernel.hash_and_check(data, offset, spec.top_k, spec.num_experts, stored)
        check_sum(view, computed)
        _refuse(ids_NK, spec, bad)
        return ids_TLK
    check_sum(view)
    check(ids_TLK, header.captured, spec)
    return ids_TLK


def check(ids_TLK: np.ndarray, captured: Runs, spec: RouterSpec, first_row: int = 0) -> None:
    """Raise WireError for a captured row with bad ids, or another row with ids that are not zero.

    `first_row` is the number of the first of these rows in the blob.
    """
    for start, end, known in captured:
        if known:
            ids_NK = ids_TLK[start:end].reshape(-1, spec.top_k)
            _refuse(ids_NK, spec, kernel.first_bad_set(ids_NK, spec.num_experts), first_row + start)
        elif ids_TLK[start:end].any():
            row = first_row + start + int(np.argmax(ids_TLK[start:end].any(axis=(1, 2))))
            raise WireError(f"row {row} is not captured, so its ids must be zero, got other values")


def _refuse(ids_NK: np.ndarray, spec: RouterSpec, bad: int, first_row: int = 0) -> None:
    """Raise WireError for the bad set with index `bad`; -1 means that there is none."""
    if bad < 0:
        return
    row, column = divmod(bad, len(spec.layers))
    raise WireError(
        f"row {first_row + row}, layer {spec.layers[column]}: expected {spec.top_k} different experts in "
        f"[0, {spec.num_experts}), got {ids_NK[bad].tolist()}"
    )
