"""Reduce long runs to few points: neighbouring steps become one bin with its smallest, mean and largest value.

A page of 100,000 steps would be as large as the data and could not show more than its width in pixels. The smallest
and the largest value are kept, so that a single spike keeps its position and height.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

MOST_STEPS = 1000
"""Runs of up to this many steps are shown step by step."""
BINS = 500
"""The approximate number of bins: about one for each pixel of a chart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Hold one step, or the steps of one bin. The values are None if none of them was finite.

    `not_finite` is the number of steps whose value was not finite.
    """

    step: int
    low: float | None
    mean: float | None
    high: float | None
    not_finite: int

    @classmethod
    def of(cls, step: int, value: float) -> Point:
        """Return the Point of one step; a `value` of NaN means that it was not finite."""
        return cls(step, None, None, None, 1) if math.isnan(value) else cls(step, value, value, value, 0)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Divide steps into bins of `width`, beginning at `first`; all runs share one grid, so that their bins align."""

    first: int
    width: int

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> Grid | None:
        """Return the grid for runs of these steps; None if all runs are short."""
        if max(map(len, runs), default=0) <= MOST_STEPS:
            return None
        first, last = min(map(min, filter(None, runs))), max(map(max, filter(None, runs)))
        return cls(first, -(-(last - first + 1) // BINS))

    def starts(self, steps: np.ndarray) -> list[int]:
        """Return the first step of each bin that has one of `steps`."""
        bins = np.unique((steps - self.first) // self.width)
        return (self.first + bins * self.width).tolist()

    def gather(self, steps: np.ndarray, values: np.ndarray) -> list[Point]:
        """Return one Point per bin that has a step, in order. The first step of a bin identifies it in every run."""
        if not len(steps):
            return []
        bins = (steps - self.first) // self.width
        order = np.argsort(bins, kind="stable")
        bins, values = bins[order], values[order]
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        finite = ~np.isnan(values)
        known = np.add.reduceat(finite, starts, dtype=np.int64)
        missing = np.add.reduceat(~finite, starts, dtype=np.int64)
        means = np.add.reduceat(np.where(finite, values, 0.0), starts) / np.maximum(known, 1)
        lows, highs = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
        means = np.clip(means, lows, highs)  # rounding of the sum can move the mean outside
        first_steps = self.first + bins[starts] * self.width
        columns = (array.tolist() for array in (first_steps, lows, means, highs, missing, known))
        return [
            Point(step, low, mean, high, absent) if count else Point(step, None, None, None, absent)
            for step, low, mean, high, absent, count in zip(*columns, strict=True)
        ]
