"""Shares a trainer's weights with vLLM's workers through memory that they map, without using a disk.

    with share(checkpoint_tensors(model)) as weights:
        engine.update_weights(weights, version=12)              # VllmEngine, VllmHttpEngine on this machine

With vLLM's own calls and its backend "router_replay", `weights.info()` is the `update_info` of /update_weights, and
the memory must stay open until /finish_weight_update has returned; reset the prefix cache afterwards.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pathlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch

from router_replay.engines import shared_memory
from router_replay.engines.copies import Move
from router_replay.engines.pieces import Piece, by_tensor, in_checkpoint, moves_of, pieces_of
from router_replay.engines.shared_memory import SHARED_MEMORY
from router_replay.engines.vllm.plugin.weights.sources import DTYPES
from router_replay.errors import EngineError

ALIGNMENT = 64


def share(state: Mapping[str, torch.Tensor]) -> SharedWeights:
    """Copy the tensors of `state`, from any device, into new shared memory, and return it.

    The names are those of a Hugging Face checkpoint, as `checkpoint_tensors` returns them. Each tensor must be whole,
    not a shard.
    """
    weights = SharedWeights(state)
    try:
        weights.write(state)
    except BaseException:
        weights.close()
        raise
    return weights


def checkpoint_tensors(model: Any, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a transformers `model` with the names and shapes that save_pretrained writes.

    The module's own tensors differ, because its experts are fused. The results are views, so nothing is copied.
    `state` is the model's state dict, if the caller has one (for example gathered from shards, or cast).
    """
    return dict(in_checkpoint(pieces_of(model), model.state_dict() if state is None else state))


def index_of(like: Mapping[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the place of each tensor in one piece of memory, ready for JSON, and the length of the memory.

    The tensors have the names, shapes and dtypes of `like`, whose values are not read.
    """
    tensors: dict[str, dict[str, Any]] = {}
    length = 0
    for name, tensor in like.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise EngineError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}")
        length = math.ceil(length / ALIGNMENT) * ALIGNMENT
        tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": length}
        length += tensor.numel() * tensor.itemsize
    if not length:
        raise EngineError("there are no weights to share: expected at least one tensor that is not empty")
    return tensors, length


class PieceWriter:
    """Writes tensors of a transformers model into memory that holds their pieces with the index `told`.

    Each tensor of the model takes few copies, and one if its pieces lie there as in the model.
    """

    def __init__(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        self._told = told
        self._moves: dict[tuple[str, torch.Size], tuple[torch.dtype, list[Move]]] = {}

    def write(self, pieces: list[Piece], tensors: Mapping[str, torch.Tensor], memory: torch.Tensor) -> int:
        """Write `tensors` with these `pieces` into the bytes `memory`, and return the number of copies.

        Each tensor is read once, and not kept.
        """
        copies = 0
        for name, own in by_tensor(pieces).items():
            tensor = tensors[name].detach().contiguous()
            dtype, moves = self._moves_of(name, own, tensor.shape)
            target = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
            for move in moves:
                move.make(tensor, target)
            copies += len(moves)
            del tensor
        return copies

    def _moves_of(self, name: str, pieces: list[Piece], shape: torch.Size) -> tuple[torch.dtype, list[Move]]:
        found = self._moves.get((name, shape))
        if found is None:
            for piece in pieces:
                if list(piece.shape) != self._told[piece.name]["shape"]:
                    expected = self._told[piece.name]["shape"]
                    raise EngineError(f"{piece.name} has shape {list(piece.shape)}, expected {expected}")
            [dtype] = {DTYPES[self._told[piece.name]["dtype"]] for piece in pieces}  # that of the model's tensor
            offsets = {piece.name: self._told[piece.name]["offset"] // dtype.itemsize for piece in pieces}
            found = self._moves[name, shape] = dtype, moves_of(pieces, shape, offsets)
        return found


class SharedWeights:
    """Allocates a shared memory segment for tensors with the names, shapes and dtypes of `like`; `write` fills it.

    `close` or the end of this process removes it; segments left by killed processes are removed when the next one is
    created.
    """

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        self.name = shared_memory.new_name()
        self._tensors, length = index_of(like)
        shared_memory.sweep(SHARED_MEMORY)
        self._pieces = PieceWriter(self._tensors)
        self._memory, lock = _allocate(self.name, length)
        self._unlink = weakref.finalize(self, _give_up, os.getpid(), SHARED_MEMORY / self.name, lock, self._memory)

    def write(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of `state`, which have the same names and shapes. No engine may read meanwhile."""
        if state.keys() != self._tensors.keys():
            differing = sorted(state.keys() ^ self._tensors.keys())
            raise EngineError(
                "expected the tensors that this shared memory was made for; these are in only one of the two: "
                f"{', '.join(differing[:5])}"
            )
        self.write_each(state.items())

    def write_each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors as they come, under names that this memory has. No engine may read meanwhile."""
        self._refuse_closed()
        for name, tensor in tensors:
            told = self._tensors[name]
            if list(tensor.shape) != told["shape"]:
                raise EngineError(f"{name} has shape {list(tensor.shape)}, expected {told['shape']}")
            if not tensor.numel():
                continue
            flat = torch.frombuffer(
                self._memory, dtype=DTYPES[told["dtype"]], count=tensor.numel(), offset=told["offset"]
            )
            flat.view(tensor.shape).copy_(tensor.detach())

    def write_pieces(self, pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> int:
        """Write a model's `tensors`, of which this memory has all `pieces`, and return the number of copies.

        No engine may read meanwhile.
        """
        self._refuse_closed()
        copies = self._pieces.write(pieces, tensors, torch.frombuffer(self._memory, dtype=torch.uint8))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # another process reads what was copied from the GPU
        return copies

    def _refuse_closed(self) -> None:
        if not self._unlink.alive:
            raise EngineError("this shared memory was closed: allocate it again with share")

    def info(self) -> dict[str, Any]:
        """Return how vLLM finds the tensors: the `update_info` of its /update_weights, ready for JSON."""
        return {"shared": {"name": self.name, "tensors": self._tensors}}

    def close(self) -> None:
        """Remove the segment. Calling it twice does no harm."""
        self._unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _give_up(owner: int, path: pathlib.Path, lock: int, memory: mmap.mmap | None) -> None:
    if os.getpid() != owner:  # a fork of the trainer has a copy of this object, and must not remove the file
        return
    path.unlink(missing_ok=True)
    os.close(lock)
    if memory is not None:
        with contextlib.suppress(BufferError):  # still in use; it is freed with its last user
            memory.close()


def _allocate(name: str, length: int) -> tuple[mmap.mmap, int]:
    """Allocate memory that is backed by the machine, and return it with the handle that marks it as in use.

    Without it, a write to a segment that is larger than the available memory would kill the process.
    """
    if not SHARED_MEMORY.is_dir():
        raise EngineError(f"this machine has no {SHARED_MEMORY}: save a folder and pass its path to update_weights")
    path = SHARED_MEMORY / name
    try:
        handle = shared_memory.create(path)
    except OSError as error:
        raise _no_room(length, error) from error
    try:
        os.posix_fallocate(handle, 0, length)
        return mmap.mmap(handle, length), handle
    except BaseException as error:
        _give_up(os.getpid(), path, handle, None)
        if isinstance(error, OSError):
            raise _no_room(length, error) from error
        raise


def _no_room(length: int, error: OSError) -> EngineError:
    return EngineError(
        f"{length / 2**20:.0f} MiB of shared memory could not be allocated in {SHARED_MEMORY} ({error}): make it "
        "larger (containers have 64 MiB by default), or save a folder and pass its path to update_weights"
    )
