"""Shares a trainer's weights with a vLLM worker on the same GPU by CUDA IPC: nothing passes through the host.

weights = CudaWeights(tensors, gpu=0)           # allocates memory of the GPU for all versions
weights.write_each(tensors.items())
engine.update_weights(weights, version=12)      # VllmEngine with the plugin, on the same GPU
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from router_replay.engines.pieces import Piece
from router_replay.engines.vllm.plugin.weights.sources import DTYPES, gpu_name
from router_replay.engines.vllm.weights import PieceWriter, index_of
from router_replay.errors import EngineError


class CudaWeights:
    """Allocates memory on GPU number `gpu` for tensors with the names, shapes and dtypes of `like`.

    It stays until `close`, which must come after the engine's last use of it. Raises EngineError if the GPU has no
    room for it, or if it cannot be shared.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], gpu: int) -> None:
        self._tensors, length = index_of(like)
        self._pieces = PieceWriter(self._tensors)
        try:
            self._memory = torch.empty(length, dtype=torch.uint8, device=torch.device("cuda", gpu))
            _, *parts = self._memory.untyped_storage()._share_cuda_()
        except RuntimeError as error:  # also torch.OutOfMemoryError
            reason = str(error).strip().partition("\n")[0]
            raise EngineError(
                f"{length / 2**20:.0f} MiB of the memory of {gpu_name(gpu)} cannot be shared: {reason}"
            ) from error
        self._users = parts[3], parts[4]  # the place where torch counts who uses the memory
        described = ["b" + base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in parts]
        self._told = {"gpu": gpu_name(gpu), "memory": described, "tensors": self._tensors}
        self._closed = False

    def write_each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors as they come, under names that this memory has. No engine may read meanwhile."""
        self._refuse_closed()
        for name, tensor in tensors:
            told = self._tensors[name]
            if list(tensor.shape) != told["shape"]:
                raise EngineError(f"{name} has shape {list(tensor.shape)}, expected {told['shape']}")
            dtype, begin = DTYPES[told["dtype"]], told["offset"]
            place = self._memory[begin : begin + tensor.numel() * dtype.itemsize].view(dtype)
            place.view(tensor.shape).copy_(tensor.detach())
        torch.cuda.synchronize(self._memory.device)  # the engine reads in another process

    def write_pieces(self, pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> int:
        """Write a model's `tensors`, of which this memory has all `pieces`, and return the number of copies.

        No engine may read meanwhile.
        """
        self._refuse_closed()
        copies = self._pieces.write(pieces, tensors, self._memory)
        torch.cuda.synchronize(self._memory.device)  # the engine reads in another process
        return copies

    def info(self) -> dict[str, Any]:
        """Return how vLLM finds the tensors, ready for JSON."""
        return {"cuda": self._told}

    def close(self) -> None:
        """Give the memory back, also if a worker that used it has died. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        # torch keeps shared memory until its user says that it is done, which a worker that ends does not do.
        torch.UntypedStorage._release_ipc_counter(*self._users, device=self._memory.device)
        self._memory = torch.empty(0, dtype=torch.uint8)
        torch.cuda.ipc_collect()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("this memory of the GPU was closed: make a new CudaWeights")
