"""What must be true of rows where they enter: shape of the masks, range of the ids, no expert twice in a row.

`routes.py` calls these once, when a Routes is made from somebody else's arrays; what is made from a Routes
is not checked again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from router_replay import kernel
from router_replay.errors import RoutesError
from router_replay.runs import Runs
from router_replay.spec import RouterSpec


def as_integers(array: Any, name: str) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind not in "ui":
        raise RoutesError(f"{name} must hold integers, got dtype {array.dtype}")
    return array


def captured_runs(captured: ArrayLike | None, rows: int) -> Runs:
    if captured is None:
        return Runs.constant(True, rows)
    mask = np.asarray(captured)
    if mask.dtype != bool or mask.shape != (rows,):
        raise RoutesError(f"captured must be {rows} booleans, one per row, got {mask.dtype} {list(mask.shape)}")
    return Runs.of(mask)


def version_runs(versions: ArrayLike | int | None, rows: int) -> Runs | None:
    if versions is None:
        return None
    array = np.asarray(versions)
    if array.dtype.kind not in "ui" or array.shape not in ((), (rows,)):
        raise RoutesError(
            f"versions must be an integer or {rows} integers, one per row, got {array.dtype} {list(array.shape)}"
        )
    if array.size and (array.min() < 0 or array.max() >= 1 << 63):
        raise RoutesError(f"a policy version must be between 0 and 2**63 - 1, got {array.min()} to {array.max()}")
    return Runs.constant(int(array), rows) if array.shape == () else Runs.of(array.astype(np.int64))


def checked_ids(ids_TLK: np.ndarray, spec: RouterSpec, captured: Runs) -> np.ndarray:
    """`ids` in the spec's dtype, after the range and duplicate check of every captured row."""
    for start, end in captured.spans(True):
        if ids_TLK.dtype != spec.dtype and end > start:  # the cast below must not wrap a value around
            piece = ids_TLK[start:end]
            if int(piece.min()) < 0 or int(piece.max()) >= spec.num_experts:
                _refuse(piece, spec, start)
    if ids_TLK.dtype == spec.dtype and not captured.spans(False):
        ids = np.ascontiguousarray(ids_TLK)  # no copy where it is contiguous
    else:
        ids = np.zeros(ids_TLK.shape, spec.dtype)
        for start, end in captured.spans(True):
            ids[start:end] = ids_TLK[start:end]
    for start, end in captured.spans(True):
        if kernel.first_bad_set(ids[start:end].reshape(-1, spec.top_k), spec.num_experts) >= 0:
            _refuse(ids_TLK[start:end], spec, start)
    return read_only(ids)


def _refuse(ids_TLK: np.ndarray, spec: RouterSpec, first_row: int) -> None:
    """Raise for the first bad set of this piece. Slow and plain: it runs once, on the way out."""
    for row, layer_sets in enumerate(ids_TLK.tolist()):
        for column, experts in enumerate(layer_sets):
            place = f"row {first_row + row}, layer {spec.layers[column]}: experts {experts}"
            if min(experts) < 0 or max(experts) >= spec.num_experts:
                hint = "; a missing row is said by captured=, never by a value" if min(experts) < 0 else ""
                raise RoutesError(f"{place} are not all in [0, {spec.num_experts}){hint}")
            if len(set(experts)) != len(experts):
                hint = " (an all-zero row is a row that was never captured)" if not any(experts) else ""
                raise RoutesError(f"{place} repeat an expert{hint}")


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
