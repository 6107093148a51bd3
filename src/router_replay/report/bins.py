"""Long runs in few points: neighbouring steps become one bin with its least, mean and greatest value.

A page of 100,000 steps would be as large as the data and could not show more than its width in pixels. The least and
the greatest value are kept, so that a single spike stays where it was and as high as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

MOST_STEPS = 1000
"""Runs of up to so many steps are shown step by step."""
BINS = 500
"""About one for each pixel of a chart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One step, or the steps of one bin. The values are None where none of them was finite."""

    step: int
    low: float | None
    mean: float | None
    high: float | None
    not_finite: int

    @classmethod
    def of(cls, step: int, value: float) -> Point:
        """One step; NaN is a value that was not finite."""
        return cls(step, None, None, None, 1) if math.isnan(value) else cls(step, value, value, value, 0)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Bins of `width` steps each, the first beginning at `first`; one grid for all runs, so that they line up."""

    first: int
    width: int

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> Grid | None:
        """The grid for runs of these steps; None where all are short."""
        if max(map(len, runs), default=0) <= MOST_STEPS:
            return None
        first, last = min(map(min, filter(None, runs))), max(map(max, filter(None, runs)))
        return cls(first, -(-(last - first + 1) // BINS))

    def gather(self, steps: np.ndarray, values: np.ndarray) -> list[Point]:
        """One Point per bin that has a step, in order. A bin is named by its first step, in every run alike."""
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
        means = np.clip(means, lows, highs)  # a sum rounds
        first_steps = self.first + bins[starts] * self.width
        columns = (array.tolist() for array in (first_steps, lows, means, highs, missing, known))
        return [
            Point(step, low, mean, high, absent) if count else Point(step, None, None, None, absent)
            for step, low, mean, high, absent, count in zip(*columns, strict=True)
        ]
