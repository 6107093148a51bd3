"""MegatronRecorded holds the routes of the passes of a record block, and brings those of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed

from router_replay.batch.megatron import MegatronLayout, Share
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay.megatron.passes import ChunkRecording
from router_replay.replay.megatron.routers import Found
from router_replay.routes import Routes


class MegatronRecorded:
    """Holds what the routers of this rank chose in a record block: one Share per micro-batch, in order.

    Pass it to `MegatronReplay.replay` to use the same experts again, on the same ranks and micro-batches. `found` is
    this rank's part of the model, and `recordings` has one entry for each of its chunks with routers.
    """

    def __init__(self, found: Found, recordings: Sequence[ChunkRecording]) -> None:
        self._found = found
        self._recordings = recordings

    @property
    def shares(self) -> list[Share]:
        """The rows of this rank, on its device in the narrow dtype, one Share per micro-batch.

        On a rank without routed layers the list is empty. Raises ReplayError if chunks ran different passes.
        """
        shapes = [recording.shapes for recording in self._recordings]
        if not shapes:
            return []
        if not shapes[0] or any(other != shapes[0] for other in shapes):
            raise ReplayError(
                "expected at least one complete forward pass in the record block, and the same passes in every chunk, "
                f"got {[len(passes) for passes in shapes]} passes"
            )
        return [self._share(number, *shape) for number, shape in enumerate(shapes[0])]

    @property
    def routes(self) -> Routes:
        """The rows of all micro-batches in the order of their tokens, on the host.

        Raises ReplayError if other ranks hold a part of them: then use `gather`.
        """
        found = self._found
        layout = found.layout
        if layout.parts * layout.context_parts > 1 or layout.layers != found.spec.layers:
            raise ReplayError(
                "other ranks hold a part of these routes (sequence, context or pipeline parallelism): call gather() on "
                "all of them, which returns one Routes per micro-batch"
            )
        return Routes.concat(self.gather())

    def gather(self, boundaries: Sequence[np.ndarray] | None = None) -> list[Routes]:
        """Return the whole model's rows of each micro-batch, in the order of its tokens, on every rank.

        `boundaries` are the cu_seqlens of each micro-batch, needed for packed sequences under context parallelism.
        All ranks of the tensor, context and pipeline parallel groups must call this together. Data parallel ranks have
        micro-batches of their own, which are not exchanged.
        """
        found = self._found
        mine = [(share.rows.ids.cpu().numpy(), share.sequences) for share in self.shares]
        parts = [(found.layout, mine)]
        for group in (found.tensor_group, found.context_group, found.pipeline_group):
            parts = _exchanged(parts, group)
        passes = max(len(shares) for _, shares in parts)
        parts = [part for part in parts if part[1]]  # a stage without routed layers has none
        if boundaries is not None and len(boundaries) != passes:
            raise ReplayError(
                f"boundaries must have one entry per micro-batch: expected {passes}, got {len(boundaries)}"
            )
        return [
            self._whole(
                [(layout, shares[number]) for layout, shares in parts],
                None if boundaries is None else boundaries[number],
            )
            for number in range(passes)
        ]

    def _whole(
        self, parts: Sequence[tuple[MegatronLayout, tuple[np.ndarray, int]]], boundaries: np.ndarray | None
    ) -> Routes:
        """Join the parts of one micro-batch: each has its layers, its tokens in router order, and its sequences."""
        spec = self._found.spec
        layout, (ids, sequences) = parts[0]
        tokens = len(ids) * layout.parts * layout.context_parts
        refuse_unknown_boundaries(layout, sequences, boundaries)
        whole = np.zeros((tokens, *spec.row_shape), spec.dtype)
        for layout, (ids, _) in parts:
            columns = [spec.layers.index(layer) for layer in layout.layers]
            whole[layout.index(tokens, sequences, boundaries)[:, None], columns] = ids
        return Routes(whole, spec)

    def _share(self, number: int, positions: int, sequences: int) -> Share:
        ids_TLK = torch.stack([column[number] for one in self._recordings for column in one.pieces], dim=1)
        captured = torch.ones(len(ids_TLK), dtype=torch.bool, device=ids_TLK.device)
        spec = self._found.spec.select(self._found.layout.layers)
        rows = TensorRoutes(ids_TLK, captured, spec, True)
        return Share(rows, positions * sequences, sequences, layout=self._found.layout)


def refuse_unknown_boundaries(layout: MegatronLayout, sequences: int, boundaries: np.ndarray | None) -> None:
    """Raise ReplayError if `boundaries` are None, and `layout` cuts each packed sequence of a micro-batch by itself.

    A micro-batch of several `sequences` has sequences of equal length, and needs no boundaries.
    """
    if layout.context_parts > 1 and layout.context_kind == "zigzag" and sequences == 1 and boundaries is None:
        raise ReplayError(
            "context parallelism cuts every packed sequence, and their boundaries are not known: pass a Batch, a Share "
            "that was cut with boundaries, or gather(boundaries=[...]); [0, tokens] if there is one sequence"
        )


def _exchanged(parts: list[Any], group: Any) -> list[Any]:
    """Return the parts of all ranks of the group."""
    if group is None or group.size() == 1:
        return parts
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, parts, group=group)
    return [part for one in everyone for part in one]
