"""Share all versions of the policy with vLLM on this machine through one segment of shared memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from router_replay.engines.lazy_tensors import like_of
from router_replay.engines.pieces import Piece
from router_replay.engines.vllm.weights import SharedWeights
from router_replay.errors import EngineError


class Segment:
    """Hold the segment for the weights of a model that consists of `pieces`. The first write creates it.

    It is not created if shared memory has no room for it: many containers have 64 MB.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._weights: SharedWeights | None = None
        self._fits = True

    def write(self, state: Mapping[str, torch.Tensor]) -> SharedWeights | None:
        """Write these weights into the segment, each when it is read, and return it, or None if they do not fit."""
        if not self._fits:
            return None
        if self._weights is None:
            like = like_of(state)
            told = {
                piece.name: torch.empty(piece.shape, dtype=like[piece.tensor].dtype, device="meta")
                for piece in self._pieces
            }
            try:
                self._weights = SharedWeights(told)
            except EngineError:
                self._fits = False
                return None
        self._weights.write_pieces(self._pieces, state)
        return self._weights

    def close(self) -> None:
        """Remove the segment, if there is one."""
        if self._weights is not None:
            self._weights.close()
