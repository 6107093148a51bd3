"""RowSpans: the rows of a batch that still lie in the sources of its samples. They are read where they are used.

Two stored samples of 3 and 2 tokens, packed into one bin padded to multiples of 4:

    slot    0  1  2  3 | 4  5  6  7
    spans   a[0:3]   . | b[0:2]   .        a dot is padding, which has no source

A slice or a choice of slots is made of the parts of these spans, and `read` fetches no row outside them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from router_replay.errors import BatchError
from router_replay.route_source import RouteSource
from router_replay.routes import Routes
from router_replay.runs import Runs
from router_replay.spec import RouterSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """The rows [first, last) of `source`; padding, which is uncaptured, if `source` is None."""

    source: RouteSource | None
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def cut(self, first: int, last: int) -> Span:
        """Return the part [first, last) of this span."""
        return Span(self.source, self.first + first, self.first + last)


class RowSpans(RouteSource):
    """The rows of `spans`, one after the other, for the model of `model_spec`."""

    def __init__(self, model_spec: RouterSpec, spans: Iterable[Span]) -> None:
        self._spec = model_spec
        self.spans = tuple(span for span in spans if len(span))
        self._ends = np.cumsum([0, *map(len, self.spans)])

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the model that the rows belong to."""
        return self._spec

    @functools.cached_property
    def captured_runs(self) -> Runs:
        """The mask `captured` as runs of equal values."""
        return Runs.concat(
            Runs.constant(False, len(one))
            if one.source is None
            else one.source.captured_runs.slice(one.first, one.last)
            for one in self.spans
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: slice) -> RowSpans:
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise BatchError(f"rows that lie in a store can be indexed only by a slice with step 1, got {rows!r}")
        start, stop, _ = rows.indices(len(self))
        return RowSpans(self._spec, self._parts(start, max(start, stop)))

    def take(self, index: np.ndarray) -> RowSpans:
        """Return the rows at `index`, in this order."""
        return RowSpans(self._spec, [part for start, stop in _runs(index) for part in self._parts(start, stop)])

    def read(self, first: int = 0, last: int | None = None, layers: Sequence[int] | None = None) -> Routes:
        """Read the rows from `first` up to but without `last` (default: all), of these `layers` (default: all)."""
        spec = self._spec if layers is None else self._spec.select(layers)
        parts = [
            Routes.missing(len(one), spec) if one.source is None else one.source.read(one.first, one.last, layers)
            for one in self._parts(first, len(self) if last is None else last)
        ]
        return Routes.concat(parts) if parts else Routes.missing(0, spec)

    def _parts(self, start: int, stop: int) -> list[Span]:
        """Return the spans of the rows [start, stop)."""
        if start >= stop:
            return []
        found = range(int(np.searchsorted(self._ends, start, side="right")) - 1, int(np.searchsorted(self._ends, stop)))
        ends = self._ends.tolist()
        return [
            self.spans[number].cut(max(start, ends[number]) - ends[number], min(stop, ends[number + 1]) - ends[number])
            for number in found
        ]


def read_rows(source: RouteSource, index: np.ndarray, layers: Sequence[int] | None = None) -> Routes:
    """Read the rows of `source` at `index`, in this order, of these `layers` (default: all).

    Rows that are neighbours in the source are read together, in whatever order `index` has them.
    """
    wanted, place = np.unique(index, return_inverse=True)
    runs = [source.read(start, stop, layers) for start, stop in _runs(wanted)]
    return Routes.concat(runs).take(place) if runs else source.read(0, 0, layers)


def _runs(index: np.ndarray) -> list[tuple[int, int]]:
    """Return the (start, stop) pairs of the runs of consecutive numbers in `index`."""
    if not len(index):
        return []
    cuts = np.flatnonzero(np.diff(index) != 1) + 1
    starts, stops = index[[0, *cuts]], index[[*(cuts - 1), -1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
