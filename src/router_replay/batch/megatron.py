"""MegatronLayout says which rows of a micro-batch a rank's routers get, and in which order. It needs no torch.

A trainer numbers the tokens of a micro-batch sequence by sequence, as in `input_ids.flatten()` of [b, s]. Megatron's
hidden states are [s, b, h], so its routers get the first token of every sequence, then the second. Context
parallelism gives each rank a part of every sequence. Sequence parallelism then gives each rank of the tensor parallel
group one part of the positions.

Two sequences of four tokens, 0 1 2 3 and 4 5 6 7, over two ranks with sequence parallelism:

    rank 0: 0 4 1 5        rank 1: 2 6 3 7
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from router_replay.arguments import exact_int
from router_replay.batch.sharding import ShardKind, shard_index
from router_replay.batch.spans import read_rows
from router_replay.errors import BatchError
from router_replay.route_source import RouteSource
from router_replay.routes import Routes


@dataclasses.dataclass(frozen=True)
class MegatronLayout:
    """Describes one rank of a Megatron model: its routed layers, and its part of the tokens.

    `layers` are the absolute ids of the routed layers on this rank, over all its chunks. `parts` is the size of the
    tensor parallel group with sequence parallelism, and 1 without it; `part` is the rank in that group. `context_parts`
    and `context_part` are the same for context parallelism, and `context_kind` is how it cuts: "zigzag" (Megatron's
    own) or "contiguous". A layout can be sent to the process that holds the routes, so that only this rank's share
    travels. Use `index` for the tokens and `share` for the rows: both have the same order.
    """

    layers: tuple[int, ...]
    part: int = 0
    parts: int = 1
    context_part: int = 0
    context_parts: int = 1
    context_kind: ShardKind = "zigzag"

    def index(self, tokens: int, sequences: int = 1, boundaries: np.ndarray | None = None) -> np.ndarray:
        """Return the numbers of this rank's tokens in the order of its routers.

        `tokens` is the number of tokens of the micro-batch, which has `sequences` sequences of equal length. Packed
        sequences count as one; `boundaries` are their cu_seqlens, which only context parallelism needs. Raises
        BatchError if the numbers do not divide.
        """
        sequences = exact_int(sequences, "micro_batch_size", BatchError, 1)
        if tokens % sequences:
            raise BatchError(
                f"a micro-batch of {sequences} sequences must have equally many tokens in each, got {tokens} tokens: "
                "pass the micro_batch_size of the schedule, and pad the sequences to one length"
            )
        own = np.arange(tokens) if self.context_parts == 1 else self._context_index(tokens, sequences, boundaries)
        length = len(own) // sequences
        if length % self.parts:
            raise BatchError(
                f"with sequence parallelism the length of the sequences must be a multiple of the tensor parallel size "
                f"{self.parts}, got {length}: pack with pad_to_multiple_of={self.parts}"
            )
        piece = length // self.parts
        return own.reshape(sequences, length).T[self.part * piece : (self.part + 1) * piece].reshape(-1)

    def cut_mask(
        self, mask: Any, tokens: int, sequences: int = 1, boundaries: np.ndarray | None = None, name: str = "mask"
    ) -> np.ndarray:
        """Return this rank's part of `mask`, which has one entry for each of the `tokens` of the micro-batch.

        `sequences` and `boundaries` are as in `index`; `name` is for error messages.
        """
        found = np.asarray(mask, bool)
        if found.shape != (tokens,):
            raise BatchError(f"{name} must have one entry per token: expected [{tokens}], got {list(found.shape)}")
        return found[self.index(tokens, sequences, boundaries)]

    def _context_index(self, tokens: int, sequences: int, boundaries: np.ndarray | None) -> np.ndarray:
        """Return this rank's part of every sequence under context parallelism, sequence by sequence."""
        ends = np.arange(1, sequences + 1) * (tokens // sequences)
        if boundaries is None or sequences > 1:
            boundaries = np.concatenate([[0], ends])
        return shard_index(boundaries, ends, self.context_part, self.context_parts, self.context_kind)

    def share(
        self,
        routes: RouteSource,
        sequences: int = 1,
        *,
        boundaries: np.ndarray | None = None,
        padding: Any = None,
        idle: Any = None,
    ) -> Share:
        """Return this rank's rows of a micro-batch.

        `routes` have one row per token of the micro-batch, sequence by sequence, with the columns of at least this
        rank's layers; `sequences` and `boundaries` are as in `index`. `padding` [T] is True for padding, `idle` [T] for
        tokens that predict nothing. Of rows that lie in a store, only this rank's are read.
        """
        index = self.index(len(routes), sequences, boundaries)

        def cut(mask: Any, name: str) -> np.ndarray | None:
            return None if mask is None else self.cut_mask(mask, len(routes), sequences, boundaries, name)

        masks = cut(padding, "padding"), cut(idle, "idle")
        if not self.layers:
            return Share(None, len(index), sequences, *masks, layout=self)
        whole = self.parts == self.context_parts == sequences == 1
        own = routes.read(layers=self.layers) if whole else read_rows(routes, index, self.layers)
        return Share(own, len(index), sequences, *masks, layout=self)


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a micro-batch, in the order of its routers.

    `rows` are Routes, or TensorRoutes if they were recorded; None on a rank without routed layers. `tokens` is the
    number of rows, `sequences` the micro-batch size. `padding` and `idle` are masks over the rows, or None. `layout` is
    that of the rank it was cut for.
    """

    rows: Any
    tokens: int
    sequences: int = 1
    padding: np.ndarray | None = None
    idle: np.ndarray | None = None
    layout: MegatronLayout | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the expert ids."""
        if self.rows is None:
            return 0
        return int(self.rows.nbytes if isinstance(self.rows, Routes) else self.rows.ids.nbytes)
