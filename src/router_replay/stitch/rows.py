"""The rows of a growing trajectory: appending copies nothing, and reading them as one array copies each row once."""

from __future__ import annotations

import numpy as np

from router_replay.routes import Routes
from router_replay.runs import Runs
from router_replay.spec import RouterSpec


class RowStore:
    """Stores the rows [0, len) of a trajectory; a row that is not captured is a hole, which `fill` can fill later.

    New rows wait in `_pending` as the engine returned them. Reading moves them into one buffer: a row is
    copied once if the rows are read at the end, and on average at most once more (when the buffer
    grows) if they are read after every turn.
    """

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self._stored = Routes.missing(0, spec)  # a view of the buffer's filled part
        self._buffer = self._stored.ids
        self._pending: list[Routes] = []
        self._length = 0
        self._captured_prefix = 0  # rows before the first hole
        self.rows_copied = 0  # lets tests verify that rows are copied rarely

    def __len__(self) -> int:
        return self._length

    @property
    def first_missing(self) -> int:
        """The index of the first row that is not captured; len(self) if there is no hole."""
        return self._captured_prefix

    def append(self, rows: Routes) -> None:
        """Add rows at the end. They are not copied before the next read."""
        if len(rows):
            if self._captured_prefix == self._length:
                self._captured_prefix += rows.first_missing
            self._pending.append(rows)
            self._length += len(rows)

    def fill(self, rows: Routes, start: int) -> None:
        """Fill the holes of this store from `rows`, whose first is row `start`. Captured rows are kept."""
        end = start + len(rows)
        captured = Runs.concat([piece.captured_runs for piece in self._pieces()])
        holes = [(max(a, start), min(b, end)) for a, b in captured.spans(False) if a < end and b > start]
        if not holes:
            return
        known, at, patched = self.view(self._length), 0, RowStore(self._spec)
        for hole_start, hole_end in holes:
            patched.append(known[at:hole_start])
            patched.append(rows[hole_start - start : hole_end - start].copy())
            at = hole_end
        patched.append(known[at:])
        self._buffer, self._stored, self._pending = patched._buffer, patched._stored, patched._pending
        self._captured_prefix = patched._captured_prefix

    def view(self, rows: int) -> Routes:
        """Return rows [0, rows) as one Routes; rows that were not supplied yet are uncaptured."""
        if self._pending or rows > len(self._buffer):
            self._store_pending(rows)
        if rows <= self._length:
            return self._stored[:rows]
        self._buffer[self._length : rows] = 0
        captured = Runs.concat([self._stored.captured_runs, Runs.constant(False, rows - self._length)])
        versions = Runs.concat([self._stored.version_runs_or_zero(), Runs.constant(0, rows - self._length)])
        return Routes.trusted(self._buffer[:rows], self._spec, captured, versions)

    def share(self, stop: int) -> RowStore:
        """Return a store that begins with the rows [0, stop) of this one, without copying them."""
        other = RowStore(self._spec)
        for piece in self._pieces():
            other.append(piece[: max(0, stop - len(other))])
        return other

    def _pieces(self) -> list[Routes]:
        return [self._stored, *self._pending]

    def _store_pending(self, rows: int) -> None:
        pieces, at = self._pieces(), len(self._stored)
        room = max(rows, self._length)
        if room > len(self._buffer):
            # The first read allocates just what is needed. A store that is read repeatedly grows fourfold:
            # this makes few copies, and memory that was never written to costs nothing.
            buffer = np.empty((max(room, 4 * len(self._buffer)), *self._spec.row_shape), self._spec.dtype)
            buffer[:at] = self._stored.ids
            self._buffer = buffer
            self.rows_copied += at
        for piece in self._pending:
            self._buffer[at : at + len(piece)] = piece.ids
            at += len(piece)
            self.rows_copied += len(piece)
        captured = Runs.concat([piece.captured_runs for piece in pieces])
        versions = Runs.concat([piece.version_runs_or_zero() for piece in pieces])
        self._stored = Routes.trusted(self._buffer[: self._length], self._spec, captured, versions)
        self._pending = []
