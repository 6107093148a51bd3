"""Share all versions of the policy with vLLM on this machine through one memory, of the host or of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from router_replay.engines.lazy_tensors import like_of
from router_replay.engines.pieces import Piece
from router_replay.engines.vllm.cuda_weights import CudaWeights
from router_replay.engines.vllm.weights import SharedWeights
from router_replay.errors import EngineError

Memory: TypeAlias = SharedWeights | CudaWeights


class Segment:
    """Hold the memory for the weights of a model that consists of `pieces`. It is allocated once, for all versions.

    An engine reads it inside `update_weights` only, which returns when all workers have read. So a version is written
    when no update runs: before the one that loads it.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._memory: Memory | None = None
        self._fits = True

    def allocate(self, state: Mapping[str, torch.Tensor], gpu: int | None = None) -> Memory:
        """Allocate and return memory for weights like `state`, on GPU number `gpu` or else on the host.

        Raises EngineError if there is no room: the shared memory of many containers has 64 MB.
        """
        self.close()
        like = like_of(state)
        told = {
            piece.name: torch.empty(piece.shape, dtype=like[piece.tensor].dtype, device="meta")
            for piece in self._pieces
        }
        self._memory = SharedWeights(told) if gpu is None else CudaWeights(told, gpu)
        return self._memory

    def write(self, state: Mapping[str, torch.Tensor]) -> Memory | None:
        """Write these weights into the memory, each when it is read, and return it, or None if they do not fit.

        It is memory of the host if none was allocated before.
        """
        if self._memory is None and self._fits:
            try:
                self.allocate(state)
            except EngineError:
                self._fits = False
        if self._memory is not None:
            self._memory.write_pieces(self._pieces, state)
        return self._memory

    def close(self) -> None:
        """Free the memory, if there is one."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
