"""RouteSource: anything of which rows can be read as Routes, wherever they lie.

    source.read()                          # all rows, as Routes
    source.read(4096, 8192, (10, 11))      # these rows, of these layers only

Routes are their own source. Rows may also lie in another process (`rl/cluster/routes.py`), or be spans of several
sources (`batch/spans.py`). What is known of every row without reading it is which rows are captured.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from router_replay.row_checks import read_only
from router_replay.runs import Runs
from router_replay.spec import RouterSpec

if TYPE_CHECKING:
    from router_replay.routes import Routes


class RouteSource(abc.ABC):
    """Rows of one model, one for each token of a sequence or of a batch."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def spec(self) -> RouterSpec:
        """The RouterSpec of the model that the rows belong to."""

    @property
    @abc.abstractmethod
    def captured_runs(self) -> Runs:
        """The mask `captured` as runs of equal values."""

    @abc.abstractmethod
    def read(self, first: int = 0, last: int | None = None, layers: Sequence[int] | None = None) -> Routes:
        """Return the rows from `first` up to but without `last` (default: all), of these `layers` (default: all).

        Layers are absolute ids, ascending.
        """

    def __len__(self) -> int:
        return len(self.captured_runs)

    @property
    def captured(self) -> np.ndarray:
        """A read-only mask [T], True where the row is known. It is made new at each access."""
        return read_only(self.captured_runs.expand().astype(bool))

    @property
    def all_captured(self) -> bool:
        """Whether every row is captured; True if there are no rows."""
        return all(self.captured_runs.values)

    @property
    def any_captured(self) -> bool:
        """Whether at least one row is captured."""
        return any(self.captured_runs.values)

    @property
    def first_missing(self) -> int:
        """The index of the first row that is not captured; len(self) if all are captured."""
        return len(self) if self.all_captured else self.captured_runs.spans(False)[0][0]
