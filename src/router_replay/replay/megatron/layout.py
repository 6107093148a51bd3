"""Layout says which rows of a micro-batch a rank's routers get, and in which order. It imports no torch.

A trainer numbers the tokens of a micro-batch sequence by sequence, as in `input_ids.flatten()` of [b, s]. Megatron's
hidden states are [s, b, h], so its routers get the first token of every sequence, then the second. With sequence
parallelism each rank of the tensor parallel group gets one part of the positions.

Two sequences of four tokens, 0 1 2 3 and 4 5 6 7, over two ranks with sequence parallelism:

    rank 0: 0 4 1 5        rank 1: 2 6 3 7

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from router_replay.arguments import exact_int
from router_replay.errors import ReplayError
from router_replay.routes import Routes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes one rank of a Megatron model: its routed layers, and its part of the tokens.

    `layers` are the absolute ids of the routed layers on this rank, over all its chunks. `parts` is the size of the
    tensor parallel group with sequence parallelism, and 1 without it; `part` is the rank in that group. A Layout can
    be sent to the process that holds the routes, so that only the rank's own share travels.
    """

    layers: tuple[int, ...]
    part: int = 0
    parts: int = 1

    def index(self, tokens: int, sequences: int = 1) -> np.ndarray:
        """Return the numbers of this rank's tokens in the order of its routers.

        `tokens` is the number of tokens of the micro-batch, which has `sequences` sequences of equal length; packed
        sequences count as one. Raises ReplayError if the numbers do not divide.
        """
        sequences = exact_int(sequences, "micro_batch_size", ReplayError, 1)
        if tokens % sequences:
            raise ReplayError(
                f"a micro-batch of {sequences} sequences must have equally many tokens in each, got {tokens} tokens: "
                "pass the micro_batch_size of the schedule, and pad the sequences to one length"
            )
        length = tokens // sequences
        if length % self.parts:
            raise ReplayError(
                f"with sequence parallelism the length of the sequences must be a multiple of the tensor parallel size "
                f"{self.parts}, got {length}: pack with pad_to_multiple_of={self.parts}"
            )
        own = length // self.parts
        order = np.arange(tokens).reshape(sequences, length).T[self.part * own : (self.part + 1) * own]
        return order.reshape(-1)

    def share(self, routes: Routes, sequences: int = 1, *, padding: Any = None, idle: Any = None) -> Share:
        """Return this rank's rows of a micro-batch.

        `routes` have one row per token of the micro-batch, sequence by sequence, with the columns of at least this
        rank's layers; `sequences` is the micro-batch size. `padding` [T] is True for padding, `idle` [T] for tokens
        that predict nothing.
        """
        index = self.index(len(routes), sequences)
        own = None
        if self.layers:
            own = routes if routes.spec.layers == self.layers else routes.select_layers(self.layers)
            if self.parts > 1 or sequences > 1:
                own = own.take(index)
        return Share(own, len(index), sequences, _taken(padding, index, "padding"), _taken(idle, index, "idle"))


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a micro-batch, in the order of its routers.

    `rows` are Routes, or TensorRoutes if they were recorded; None on a rank without routed layers. `tokens` is the
    number of rows, `sequences` the micro-batch size. `padding` and `idle` are masks over the rows, or None.
    """

    rows: Any
    tokens: int
    sequences: int = 1
    padding: np.ndarray | None = None
    idle: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the expert ids."""
        if self.rows is None:
            return 0
        return int(self.rows.nbytes if isinstance(self.rows, Routes) else self.rows.ids.nbytes)


def _taken(mask: Any, index: np.ndarray, name: str) -> np.ndarray | None:
    if mask is None:
        return None
    found = np.asarray(mask, bool)
    if found.ndim != 1 or (len(index) and index.max() >= len(found)):
        raise ReplayError(f"{name} must have one entry per token of the micro-batch, got {list(found.shape)}")
    return found[index]
