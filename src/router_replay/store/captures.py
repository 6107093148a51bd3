"""Stored is one sequence of a RouteStore with its captures: the rows that were recorded for exactly these tokens.

Shapes: R rows (all tokens of the sequence, or all but the last).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np

from router_replay.routes import Routes
from router_replay.runs import Runs


@dataclasses.dataclass(eq=False)
class Capture:
    """Holds the rows of one sample.

    `bears_loss_R[i]` says whether row i predicts a token of the loss; None means that every row does but the last.
    """

    routes: Routes
    bears_loss_R: np.ndarray | None
    order: int  # the number of the call that added it: the first capture wins
    disagrees: bool = False  # another sample with these tokens and this key had other rows, which were not kept

    @property
    def nbytes(self) -> int:
        """The bytes of the rows and of the mask."""
        return self.routes.nbytes + (0 if self.bears_loss_R is None else self.bears_loss_R.nbytes)


@dataclasses.dataclass(eq=False)
class Stored:
    """Holds one sequence: its bytes, and its captures by the key of the sample, the first capture first."""

    sequence: bytes
    captures: dict[Hashable, Capture]

    @property
    def nbytes(self) -> int:
        """The bytes of the tokens and of all captures."""
        return len(self.sequence) + sum(capture.nbytes for capture in self.captures.values())


def agree(one: Routes, other: Routes, rows: int | None = None) -> bool:
    """Return whether two captures have the same experts in all rows that both know, up to row `rows`."""
    length = min(len(one), len(other)) if rows is None else min(len(one), len(other), rows)
    one, other = one[:length], other[:length]
    if one.all_captured and other.all_captured:
        return one.same_sets(other) if not one.spec.ordered else np.array_equal(one.ids, other.ids)
    both = one.captured & other.captured
    return np.array_equal(one.sorted().ids[both], other.sorted().ids[both])


def completed(first: Routes, later: Routes) -> Routes:
    """Return the rows of `first`, with the rows that it lacks from `later`."""
    rows = max(len(first), len(later))
    first, later = _to_length(first, rows), _to_length(later, rows)
    take = later.captured & ~first.captured
    ids = np.where(take[:, None, None], later.ids, first.ids)
    versions = None
    if first.version_runs is not None or later.version_runs is not None:
        versions = Runs.of(np.where(take, later.versions, first.versions))
    return Routes.trusted(ids, first.spec, Runs.of(first.captured | take), versions)


def _to_length(routes: Routes, rows: int) -> Routes:
    missing = rows - len(routes)
    return Routes.concat([routes, Routes.missing(missing, routes.spec)]) if missing else routes
