"""Define the inputs of `RouterReplay.replay`: routes on the host or a device, a batch with routes, or a recording."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from router_replay.batch import NO_LABEL, LocalBatch
from router_replay.batch.sample import missing_rows
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay.state import Recording
from router_replay.route_source import RouteSource
from router_replay.routes import Routes

Rows: TypeAlias = RouteSource | TensorRoutes


class Recorded:
    """Holds the routes of the passes of a record block: rows in token order, one pass after the other."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    @property
    def tensors(self) -> TensorRoutes:
        """The routes on the model's device, in the narrow dtype; `replay` uses them without a copy to the host.

        Raises ReplayError if no complete forward pass ran in the block.
        """
        pieces = self._recording.pieces
        rows = [sum(len(piece) for piece in column) for column in pieces]
        if not all(rows) or len(set(rows)) != 1:
            raise ReplayError(
                "expected at least one complete forward pass in the record block, with equally many rows in every "
                f"routed layer, got {rows}"
            )
        columns = [column[0] if len(column) == 1 else torch.cat(column) for column in pieces]
        ids_TLK = torch.stack(columns, dim=1)
        captured = torch.ones(len(ids_TLK), dtype=torch.bool, device=ids_TLK.device)
        return TensorRoutes(ids_TLK, captured, self._recording.spec, True)

    @property
    def routes(self) -> Routes:
        """The routes as Routes, copied to the host and checked. Raises ReplayError as `tensors` does."""
        return Routes(self.tensors.ids.cpu().numpy(), self._recording.spec)


class HoldsRoutes(Protocol):
    """Describes a batch with routes. If it also has a `label_mask`, no row that bears loss may be missing."""

    @property
    def routes(self) -> Rows | None:
        """One row per token of the batch, or None if it has no routes."""


Replayable: TypeAlias = RouteSource | TensorRoutes | Recorded | HoldsRoutes


def rows_and_masks(source: Replayable, loss_mask: Any, idle: Any) -> tuple[Rows, Any, Any]:
    """Return the rows of `source`, the mask of rows that bear loss, and the mask of rows that predict nothing.

    `loss_mask` and `idle` take precedence over the masks of a batch. Raises ReplayError if `source` has no routes.
    """
    rows: Any = source
    if isinstance(source, Recorded):
        rows = source.tensors
    elif not isinstance(source, RouteSource | TensorRoutes) and hasattr(source, "routes"):
        rows = source.routes
        loss_mask = getattr(source, "label_mask", None) if loss_mask is None else loss_mask
        if idle is None and hasattr(source, "labels"):
            idle = source.labels == NO_LABEL
    if not isinstance(rows, RouteSource | TensorRoutes):
        raise ReplayError(
            f"replay() needs routes or a batch with routes, got {type(rows).__name__}: for a live pass, call the model "
            "outside the block"
        )
    return rows, loss_mask, idle


def on_device(source: Replayable, rows: Rows, device: Any) -> TensorRoutes:
    """Return the rows as tensors: those that a LocalBatch already has on `device`, otherwise a copy there."""
    if isinstance(rows, TensorRoutes):
        return rows
    kept = source.to_torch(device).routes if isinstance(source, LocalBatch) else None
    return kept or TensorRoutes.from_routes(rows, device)


def count_rows(rows: Rows, idle: Any) -> tuple[Any, Any]:
    """Return the number of replayed rows, and of rows that are live and not idle.

    The counts are tensors if `rows` are on a device, to avoid a synchronization.
    """
    if rows.all_captured:
        return len(rows), 0
    if isinstance(rows, TensorRoutes):
        captured_T: Any = rows.captured
        idle_T = None if idle is None else torch.as_tensor(idle, device=captured_T.device).bool()
    else:
        captured_T = rows.captured
        idle_T = None if idle is None else np.asarray(idle.cpu() if isinstance(idle, torch.Tensor) else idle, bool)
    live_T = ~captured_T
    if idle_T is not None:
        if idle_T.shape != live_T.shape:
            raise ReplayError(f"idle must have one entry per row: expected [{len(live_T)}], got {list(idle_T.shape)}")
        live_T = live_T & ~idle_T
    replayed, live = captured_T.sum(), live_T.sum()
    return (int(replayed), int(live)) if isinstance(rows, RouteSource) else (replayed, live)


def refuse_missing(rows: Rows, loss_mask: Any) -> None:
    """Raise ReplayError if a row that bears loss is missing."""
    if rows.all_captured:
        return
    captured = rows.captured.cpu().numpy() if isinstance(rows, TensorRoutes) else rows.captured
    mask = loss_mask.cpu().numpy() if isinstance(loss_mask, torch.Tensor) else np.asarray(loss_mask)
    if mask.shape != captured.shape:
        raise ReplayError(f"loss_mask must have one entry per row: expected [{len(captured)}], got {list(mask.shape)}")
    missing = missing_rows(captured, mask)
    if len(missing):
        raise ReplayError(
            f"{len(missing)} rows that bear loss are missing, the first is row {missing[0]}: "
            'find out why the engine left them out, or pass on_missing="live" to route them live'
        )
