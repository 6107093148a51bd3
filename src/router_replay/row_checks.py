"""Checks for rows that enter the package: mask shapes, the range of the ids, and no expert twice in a set.

`routes.py` calls these once, when a Routes is made from the caller's arrays; a Routes that is derived from another
is not checked again. Memory that other code can write to is copied first, so that checked rows cannot change.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from router_replay import kernel
from router_replay.arguments import as_array
from router_replay.errors import RoutesError, shorten
from router_replay.runs import Runs
from router_replay.spec import RouterSpec

NEVER_CAPTURED = 64
"""After this many rows, a layer that runs has almost certainly chosen an expert other than 0 at least once."""


def as_integers(array: Any, name: str) -> np.ndarray:
    """Convert to a NumPy array of integers; raise RoutesError, with `name` in the message, for any other dtype."""
    array = as_array(array, name, RoutesError)
    if array.dtype.kind not in "ui":
        raise RoutesError(f"{name} must hold integers, got dtype {array.dtype}")
    return array


def captured_runs(captured: ArrayLike | None, rows: int) -> Runs:
    """Convert a mask of `rows` booleans to runs; None means that all rows are captured."""
    if captured is None:
        return Runs.constant(True, rows)
    mask = as_array(captured, "captured", RoutesError)
    if mask.dtype != bool or mask.shape != (rows,):
        raise RoutesError(f"captured must be {rows} booleans, one per row, got {mask.dtype} {list(mask.shape)}")
    return Runs.of(mask)


def version_runs(versions: ArrayLike | int | None, rows: int) -> Runs | None:
    """Convert policy versions, one for all rows or one per row, to runs; None stays None."""
    if versions is None:
        return None
    array = as_array(versions, "versions", RoutesError)
    if array.dtype.kind not in "ui" or array.shape not in ((), (rows,)):
        raise RoutesError(
            f"versions must be an integer or {rows} integers, one per row, got {array.dtype} {list(array.shape)}"
        )
    if array.size and (array.min() < 0 or array.max() >= 1 << 63):
        raise RoutesError(f"a policy version must be between 0 and 2**63 - 1, got {array.min()} to {array.max()}")
    return Runs.constant(int(array), rows) if array.shape == () else Runs.of(array.astype(np.int64))


def checked_ids(ids_TLK: np.ndarray, spec: RouterSpec, captured: Runs, owned: bool) -> np.ndarray:
    """Check the range and the duplicates of every captured row; return the ids in the spec's dtype.

    The ids are copied before the check, unless they are `owned` (made by the caller for this purpose) or no code
    can write to them.
    """
    for start, end in captured.spans(True):
        if ids_TLK.dtype != spec.dtype:  # check the range first: the cast below must not wrap a value around
            piece = ids_TLK[start:end]
            if int(piece.min()) < 0 or int(piece.max()) >= spec.num_experts:
                _refuse(piece, spec, start)
    if ids_TLK.dtype == spec.dtype and not captured.spans(False):
        keep = owned or is_immutable(ids_TLK)
        ids = np.ascontiguousarray(ids_TLK) if keep else np.array(ids_TLK, order="C")
    else:
        ids = np.zeros(ids_TLK.shape, spec.dtype)
        for start, end in captured.spans(True):
            ids[start:end] = ids_TLK[start:end]
    for start, end in captured.spans(True):
        if kernel.first_bad_set(ids[start:end].reshape(-1, spec.top_k), spec.num_experts) >= 0:
            _refuse(ids[start:end], spec, start)
    return read_only(ids)


def _refuse(ids_TLK: np.ndarray, spec: RouterSpec, first_row: int) -> None:
    """Raise RoutesError for the first bad set of this piece. It may be slow: it runs once, before the error."""
    for row, layer_sets in enumerate(ids_TLK.tolist()):
        for column, experts in enumerate(layer_sets):
            place = f"row {first_row + row}, layer {spec.layers[column]}: experts {experts}"
            if min(experts) < 0 or max(experts) >= spec.num_experts:
                hint = "; mark a missing row with captured=, not with a negative id" if min(experts) < 0 else ""
                raise RoutesError(f"{place} are not all in [0, {spec.num_experts}){hint}")
            if len(set(experts)) != len(experts):
                hint = " (only zeros: the row was probably not captured)" if not any(experts) else ""
                raise RoutesError(f"{place} repeat an expert{hint}")


def zero_layers(ids_TLK: np.ndarray) -> list[int]:
    """Return the layer columns that are zero in every row."""
    if not len(ids_TLK):
        return []
    # Only layers that are zero in the first row need a look at all rows; looking at every layer would cost more than
    # the check of the sets.
    suspects = np.flatnonzero(~ids_TLK[0].any(axis=-1))
    return [column for column in suspects.tolist() if not ids_TLK[:, column].any()]


def never_captured(spec: RouterSpec, columns: Sequence[int], rows: int, advice: str = "") -> RoutesError:
    """Return the error for layer columns that hold only zeros in all `rows`; `advice` ends its message."""
    layers = sorted({spec.layers[column] for column in columns})
    return RoutesError(
        f"layers [{shorten(layers, 8)}] hold only zeros in all {rows} rows of the engine's array, so they were not "
        f"captured: the engine's hook did not run there (a fused router, or capture is switched off){advice}"
    )


def is_immutable(holder: Any) -> bool:
    """Return whether no code can write to this array or buffer.

    This is true if every object that holds its memory, down to the owner, is read-only. An array that owns its
    memory does not count as immutable, because its owner can make it writable again. A read-only map of a file does
    count: copying it would defeat its purpose.
    """
    while True:
        if isinstance(holder, np.ndarray) and not holder.flags.writeable:
            holder = holder.base
        elif isinstance(holder, memoryview) and holder.readonly:
            holder = holder.obj
        else:
            return isinstance(holder, bytes) or (isinstance(holder, mmap.mmap) and memoryview(holder).readonly)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view of the array that refuses writes."""
    view = array.view()
    view.flags.writeable = False
    return view
