"""The trainer's side of a weight update without a disk: tensors in memory that vLLM's workers map.

    with share(checkpoint_tensors(model)) as weights:
        engine.update_weights(weights, version=12)              # VllmEngine, VllmHttpEngine on this machine

With vLLM's own calls and its backend "router_replay", `weights.info()` is the `update_info` of /update_weights, and
the memory must stay until /finish_weight_update has returned; reset the prefix cache afterwards.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import pathlib
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch

from router_replay.engines.vllm_plugin.sources import DTYPES, SHARED_MEMORY
from router_replay.errors import EngineError

ALIGNMENT = 64


def share(state: Mapping[str, torch.Tensor]) -> SharedWeights:
    """Copy whole tensors, of any device, into shared memory; names are those of a Hugging Face checkpoint."""
    weights = SharedWeights(state)
    weights.write(state)
    return weights


def checkpoint_tensors(model: Any, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a transformers model with the names and shapes that save_pretrained writes.

    The module's own differ: its experts are fused. Mostly views, so nothing is copied here. `state` is the model's
    state dict where the caller has one: gathered from its shards, or cast.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(model.state_dict() if state is None else state))


class SharedWeights:
    """A segment of shared memory with room for these tensors. It is gone after `close`, or with this process."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        self.name = f"router-replay-{os.getpid()}-{uuid.uuid4().hex}"
        self._tensors: dict[str, dict[str, Any]] = {}
        length = 0
        for name, tensor in like.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise EngineError(f"{name} is {tensor.dtype}, which is not one of {', '.join(DTYPES)}")
            length = math.ceil(length / ALIGNMENT) * ALIGNMENT
            self._tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": length}
            length += tensor.numel() * tensor.itemsize
        if not length:
            raise EngineError("there are no weights to share")
        self._memory, lock = _allocate(self.name, length)
        self._unlink = weakref.finalize(self, _give_up, SHARED_MEMORY / self.name, lock)

    def write(self, state: Mapping[str, torch.Tensor]) -> None:
        """Fill it with these tensors, which must be the same by name and shape. No engine may be reading meanwhile."""
        if not self._unlink.alive:
            raise EngineError("this shared memory was closed")
        if state.keys() != self._tensors.keys():
            differing = sorted(state.keys() ^ self._tensors.keys())
            raise EngineError(f"this shared memory was made for other tensors: {', '.join(differing[:5])}")
        for name, tensor in state.items():
            told = self._tensors[name]
            if list(tensor.shape) != told["shape"]:
                raise EngineError(f"{name} has shape {list(tensor.shape)}, this memory has room for {told['shape']}")
            if not tensor.numel():
                continue
            flat = torch.frombuffer(
                self._memory, dtype=DTYPES[told["dtype"]], count=tensor.numel(), offset=told["offset"]
            )
            flat.view(tensor.shape).copy_(tensor.detach())

    def info(self) -> dict[str, Any]:
        """What vLLM needs to find the tensors: the `update_info` of its /update_weights, ready for JSON."""
        return {"shared": {"name": self.name, "tensors": self._tensors}}

    def close(self) -> None:
        self._unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _give_up(path: pathlib.Path, lock: int) -> None:
    path.unlink(missing_ok=True)
    os.close(lock)


def _allocate(name: str, length: int) -> tuple[mmap.mmap, int]:
    """Memory that is really there: a segment beyond the machine's limit would kill the process when it is written.

    With the handle that says that it is in use: a lock holds over containers, which do not see each other's processes.
    """
    if not SHARED_MEMORY.is_dir():
        raise EngineError(f"there is no {SHARED_MEMORY} here: save a folder and give its path to update_weights")
    path = SHARED_MEMORY / name
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.posix_fallocate(handle, 0, length)
        return mmap.mmap(handle, length), handle
    except OSError as error:
        _give_up(path, handle)
        raise EngineError(
            f"{length / 2**20:.0f} MiB of shared memory are not to be had in {SHARED_MEMORY} ({error}): make it larger "
            "(containers have 64 MiB by default), or save a folder and give its path to update_weights"
        ) from error
