"""A 1-D array that grows at its end in amortised constant time per element."""

from __future__ import annotations

import numpy as np

# What an array holds before its first element. All share it: a run has many trajectories that hold nothing yet.
_EMPTY: dict[type[np.generic], np.ndarray] = {kind: np.empty(0, kind) for kind in (np.int64, np.float32, np.bool_)}


class GrowingArray:
    """A growable array: `extend` copies new elements in; `view` returns all of them read-only, without a copy."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, dtype: type[np.generic]) -> None:
        self._buffer = _EMPTY[dtype]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, *parts: np.ndarray) -> None:
        """Copy the elements of all parts to the end, in order."""
        needed = self._length + sum(len(part) for part in parts)
        if needed > len(self._buffer):
            buffer = np.empty(max(needed, 2 * len(self._buffer)), self._buffer.dtype)
            buffer[: self._length] = self._buffer[: self._length]
            self._buffer = buffer
        for part in parts:
            self._buffer[self._length : self._length + len(part)] = part
            self._length += len(part)

    def truncate(self, length: int) -> None:
        """Keep the first `length` elements, in new memory: a view taken earlier still shows all of them."""
        self._buffer, self._length = self._buffer[:length].copy(), length

    @property
    def view(self) -> np.ndarray:
        """A read-only view of all elements; it does not grow with the array."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view
