"""FoundRows lays out the rows of a pass in the slots of its tokens, and counts them.

Shapes: T slots of the pass, L routed layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay.state import Plan
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

Slots = slice | np.ndarray


@dataclasses.dataclass(eq=False)
class FoundRows:
    """Holds the rows that were found for one pass, and what is counted of it."""

    ids_TLK: np.ndarray
    captured_T: np.ndarray
    replayed: int = 0  # rows
    live: int = 0  # rows that predict a token and are not known
    ambiguous: int = 0  # sequences that fit several samples with different rows
    unmatched: int = 0  # sequences that are not in the store

    @classmethod
    def empty(cls, slots: int, spec: RouterSpec, device: torch.device) -> FoundRows:
        """Return the rows of a pass of `slots` tokens on `device`, none of them known yet."""
        shape = (slots, *spec.row_shape)
        return cls(_host_memory(shape, spec.dtype.name, device), _host_memory(shape[:1], "bool", device))

    def put(self, slots: Slots, routes: Routes, predicting: int) -> None:
        """Lay out the `routes` of one sequence in its `slots`, of which the first `predicting` predict a token."""
        rows = min(len(routes), count(slots))
        self.ids_TLK[part_of(slots, 0, rows)] = routes.ids[:rows]
        predicted = 0
        for start, end in routes.captured_runs.spans(True):  # few: an expanded mask would cost more than the copy
            end = min(end, rows)
            if start < end:
                self.captured_T[part_of(slots, start, end)] = True
                self.replayed += end - start
                predicted += max(0, min(end, predicting) - start)
        self.live += predicting - predicted

    def plan(self, spec: RouterSpec, device: torch.device, *, agreement: bool) -> Plan | None:
        """Return the plan of these rows on `device`; None if no row is known."""
        if not self.captured_T.any():
            return None
        arrays = (self.ids_TLK, self.captured_T)
        ids_TLK, captured_T = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
        rows = TensorRoutes(ids_TLK, captured_T, spec, bool(self.captured_T.all()), True)
        return Plan.of(rows, rows, (self.replayed, self.live), agreement=agreement, start=0)


def refuse_missing(routes: Routes, bears_loss: np.ndarray | None, predicting: int, number: int) -> None:
    """Raise ReplayError if one of the first `predicting` rows of sequence `number` is missing and bears loss.

    `bears_loss` is as in the store's Match.
    """
    if routes.first_missing >= predicting:  # the usual case: an engine leaves out the row of the last token
        return
    known = np.zeros(predicting, bool)
    rows = min(predicting, len(routes))
    known[:rows] = routes.captured[:rows]
    missing = np.flatnonzero(~known if bears_loss is None else ~known & bears_loss[:predicting])
    if len(missing):
        raise ReplayError(
            f"sequence {number} of this pass is in the store, but {len(missing)} of its rows that bear loss are "
            f"missing, the first is row {missing[0]}: find out why the engine left them out, add the sequence with its "
            'loss_mask if they bear none, or pass on_missing="live" to route them live'
        )


def count(slots: Slots) -> int:
    """Return the number of slots."""
    return slots.stop - slots.start if isinstance(slots, slice) else len(slots)


def part_of(slots: Slots, start: int, end: int) -> Slots:
    """Return the slots [start, end) of a sequence."""
    return slice(slots.start + start, slots.start + end) if isinstance(slots, slice) else slots[start:end]


def _host_memory(shape: tuple[int, ...], dtype: str, device: torch.device) -> Any:
    """Return zeros in memory from which `device` copies without a wait."""
    memory = torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=device.type == "cuda").numpy()
    memory.fill(0)  # torch.zeros uses all cores, and took 2 to 3 ms for 1 MiB on 16 of them
    return memory
