"""Numbers that callers give, taken exactly or refused: no value is rounded, cut or wrapped around on the way in.

    exact_int(np.uint64(3), "start", StitchError)                  # 3, as Python's own unbounded integer
    exact_int(2.0, "start", StitchError)                           # StitchError: start must be an integer, got 2.0
    int64_array(np.array([2**64 - 1], np.uint64), "token_ids", StitchError)   # StitchError, with position and value

NumPy's integers keep their width in arithmetic: `np.uint64(2) - 3` is 2**64 - 1. So none gets past this module.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from router_replay.errors import RouterReplayError

LARGEST = (1 << 63) - 1  # what int64 holds: arrays, files and other processes count with it


def exact_int(value: Any, name: str, error: type[RouterReplayError], least: int = 0, most: int = LARGEST) -> int:
    """An integer of any type (Python's, NumPy's, torch's) as a Python int; a bool or a float is refused."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise error(f"{name} must be an integer, got {value!r}")
    if not least <= number <= most:
        bounds = f"at least {least}" if most == LARGEST else f"between {least} and {most}"
        raise error(f"{name} must be {bounds}, got {number}")
    return number


def as_array(values: Any, name: str, error: type[RouterReplayError]) -> np.ndarray:
    """What NumPy makes of `values`; lists of unequal lengths are refused with our error."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as problem:
        raise error(f"{name} cannot be read as an array: {problem}") from problem


def int64_array(values: Any, name: str, error: type[RouterReplayError]) -> np.ndarray:
    """A flat array of integers as int64. Not a copy where it is one already."""
    array = as_array(values, name, error)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "ui"):
        raise error(f"{name} must be a flat sequence of integers, got {array.dtype} {list(array.shape)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > LARGEST:
        position = int(np.argmax(array > LARGEST))
        raise error(f"{name}: {array[position]} at position {position} is beyond 2**63 - 1")
    return array.astype(np.int64, copy=False)


def float32_array(values: Any, name: str, error: type[RouterReplayError]) -> np.ndarray:
    """Numbers as float32. What becomes infinite on the way stays visible as such; check with `refuse_not_finite`."""
    array = as_array(values, name, error)
    if array.size and array.dtype.kind not in "fui":
        raise error(f"{name} must be numbers, got {array.dtype} {list(array.shape)}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def refuse_not_finite(
    array: np.ndarray, name: str, error: type[RouterReplayError], where: np.ndarray | None = None
) -> None:
    """Raise for the first NaN or infinity, among the entries of the mask `where`."""
    bad = ~np.isfinite(array) if where is None else where & ~np.isfinite(array)
    if bad.any():
        position = int(bad.argmax())
        raise error(f"{name}: the value at position {position} is {array[position]}, expected a finite number")
