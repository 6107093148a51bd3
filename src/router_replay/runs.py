"""Run-length arrays for per-row values: a trajectory has few policy versions and few uncaptured parts.

    Runs.of(np.array([7, 7, 7, 9]))   ->   values (7, 9), ends (3, 4)

The runs are plain tuples, not arrays: with so few of them, a NumPy call would cost more than the work itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np


class Runs:
    """An immutable 1-D array of integers or booleans, stored as runs of equal values.

    `ends[i]` is one past the last element of run i. The form is canonical: no run is empty, and neighbouring runs
    have different values.
    """

    __slots__ = ("ends", "values")

    def __init__(self, values: Iterable[int], ends: Iterable[int]) -> None:
        self.values = tuple(values)
        self.ends = tuple(ends)

    @classmethod
    def constant(cls, value: int, length: int) -> Runs:
        """Make the runs of `length` elements that all equal `value`."""
        return cls((value,), (length,)) if length else cls((), ())

    @classmethod
    def of(cls, array: np.ndarray) -> Runs:
        """Make the runs of a 1-D array."""
        if not len(array):
            return cls((), ())
        last = np.flatnonzero(np.append(array[1:] != array[:-1], True))
        return cls(array[last].tolist(), (last + 1).tolist())

    @classmethod
    def concat(cls, parts: Iterable[Runs]) -> Runs:
        """Concatenate the runs of all parts, in order."""
        values: list[int] = []
        ends: list[int] = []
        offset = 0
        for part in parts:
            for value, end in zip(part.values, part.ends, strict=True):
                if values and values[-1] == value:
                    ends[-1] = offset + end
                else:
                    values.append(value)
                    ends.append(offset + end)
            offset += len(part)
        return cls(values, ends)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, value) for each run."""
        return zip((0, *self.ends), self.ends, self.values, strict=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        return self.values == other.values and self.ends == other.ends

    __hash__ = None  # type: ignore[assignment]

    def slice(self, start: int, stop: int) -> Runs:
        """Return the elements [start, stop), as `array[start:stop]` would; both must lie in [0, len(self)]."""
        if start >= stop:
            return Runs((), ())
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        ends = (min(end, stop) - start for end in self.ends[first : last + 1])
        return Runs(self.values[first : last + 1], ends)

    def expand(self) -> np.ndarray:
        """Return the elements as a 1-D array; an empty one has the dtype int64."""
        if not self.values:
            return np.zeros(0, np.int64)
        lengths = np.array(self.ends)
        lengths[1:] -= lengths[:-1].copy()
        return np.repeat(np.array(self.values), lengths)

    def spans(self, value: int) -> list[tuple[int, int]]:
        """Return the (start, end) pairs of the runs that equal `value`."""
        return [(start, end) for start, end, found in self if found == value]
