"""Open new weights in a vLLM worker, from safetensors on disk or from memory of the host or the GPU that is shared.

    {"path": "/checkpoints/12"}                         a Hugging Face folder, or one .safetensors file
    {"shared": {"name": "router-replay-1f2e",           a file of /dev/shm, with an index of what lies in it
                "tensors": {"lm_head.weight": {"dtype": "bfloat16", "shape": [64, 8], "offset": 0}, ...}}}
    {"cuda": {"gpu": "GPU-...", "memory": [...],        memory of the same GPU, by CUDA IPC, with such an index
              "tensors": {...}}}

Names are those of a checkpoint, as save_pretrained writes them. Opening a source reads only its index and refuses
invalid entries. The tensors are memory maps of the file, so nothing is copied before vLLM's loaders read them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import mmap
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from router_replay.engines.shared_memory import SHARED_MEMORY
from router_replay.errors import EngineError

Index: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Place: TypeAlias = tuple[slice, ...]
# Keyed by the dtype name in the shared-memory index, and by the one in a safetensors file.
DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int64": torch.int64,
    "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
IN_FILES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Memory:
    """Hold one memory with all tensors of a source: its `bytes`, and at which of them each tensor begins."""

    bytes: torch.Tensor
    offsets: dict[str, int]

    def seen_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the whole memory as elements of `dtype`."""
        return self.bytes[: len(self.bytes) // dtype.itemsize * dtype.itemsize].view(dtype)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Hold the tensors of a source by name: the description of each, and a function that returns it.

    `part` returns a rectangle of a tensor, if that is cheaper than to read all of it. `memory` is where all of them
    lie, each contiguous, if that is one memory.
    """

    where: str
    index: Index
    read: Callable[[str], torch.Tensor]
    part: Callable[[str, Place], torch.Tensor] | None = None
    memory: Memory | None = None

    def read_part(self, name: str, place: Place) -> torch.Tensor:
        """Return the rectangle `place` of a tensor."""
        return self.read(name)[place] if self.part is None else self.part(name, place)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.read(name)) for name in self.index)


def open_source(source: Mapping[str, Any]) -> Weights:
    """Return the weights of a source; raise EngineError with the reason if it cannot be used."""
    kind = set(source) if isinstance(source, Mapping) else set()
    if kind == {"path"} and isinstance(source["path"], str):
        return _open_path(pathlib.Path(source["path"]))
    if kind == {"shared"} and isinstance(source["shared"], Mapping):
        return _open_shared(source["shared"])
    if kind == {"cuda"} and isinstance(source["cuda"], Mapping):
        return _open_cuda(source["cuda"])
    raise EngineError(
        f'the weight source must be {{"path": ...}}, {{"shared": {{...}}}} or {{"cuda": {{...}}}}, got '
        f"{str(source)[:100]}"
    )


# -- safetensors --------------------------------------------------------------------------------------


def _open_path(path: pathlib.Path) -> Weights:
    files = [path] if path.is_file() else files_of(path)
    if not files:
        raise EngineError(
            f"no .safetensors file in {path}, as the vLLM worker sees it: expected a folder that save_pretrained "
            "wrote, or one such file"
        )
    index: Index = {}
    holder: dict[str, Any] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file} is not a complete safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118  not a mapping
            if name in holder:
                raise EngineError(
                    f"{name} is in two files of {path}, and no model.safetensors.index.json says which to use"
                )
            told = opened.get_slice(name)
            if told.get_dtype() not in IN_FILES:
                raise EngineError(
                    f"{name} in {file} has dtype {told.get_dtype()}, expected one of {', '.join(IN_FILES)}"
                )
            index[name] = DTYPES[IN_FILES[told.get_dtype()]], tuple(told.get_shape())
            holder[name] = opened

    def part(name: str, place: Place) -> torch.Tensor:
        return holder[name].get_slice(name)[place] if place else holder[name].get_tensor(name)

    return Weights(str(path), index, lambda name: holder[name].get_tensor(name), part)


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that the index names; some folders contain the same tensors again in another layout."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise EngineError(f"{index} is not a checkpoint index with a weight_map: {error!r}") from error
    return [folder / name for name in names]


# -- shared memory ------------------------------------------------------------------------------------


def _open_shared(shared: Mapping[str, Any]) -> Weights:
    name, tensors = shared.get("name"), shared.get("tensors")
    if not isinstance(name, str) or not isinstance(tensors, Mapping) or not tensors:
        raise EngineError(
            'shared memory must be {"name": ..., "tensors": {name: {"dtype", "shape", "offset"}, ...}}, got '
            f"{str(shared)[:100]}"
        )
    name = name.removeprefix("/")
    if not name or "/" in name or name.startswith("."):
        raise EngineError(f"the name of shared memory must be that of a file in {SHARED_MEMORY}, got {name!r}")
    try:
        with (SHARED_MEMORY / name).open("rb") as file:
            # A private map, so that accidental writes here do not reach the trainer.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"shared memory {name} cannot be read by the vLLM worker: {error}. Run the worker on the same machine and "
            "in the same container, and keep the memory open until finish_weight_update has returned"
        ) from error
    entries = {tensor: _entry(tensor, told, len(memory)) for tensor, told in tensors.items()}

    def read(tensor: str) -> torch.Tensor:
        dtype, shape, offset = entries[tensor]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    index = {tensor: (dtype, shape) for tensor, (dtype, shape, _) in entries.items()}
    offsets = {tensor: offset for tensor, (_, _, offset) in entries.items()}
    whole = Memory(torch.frombuffer(memory, dtype=torch.uint8), offsets)
    return Weights(f"shared memory {name}", index, read, memory=whole)


# -- the memory of the same GPU -----------------------------------------------------------------------


def _open_cuda(told: Mapping[str, Any]) -> Weights:
    """Open memory that `CudaWeights` shares. The trainer and this worker must use the same GPU."""
    gpu, memory, tensors = told.get("gpu"), told.get("memory"), told.get("tensors")
    if not isinstance(memory, list) or not isinstance(tensors, Mapping) or not tensors:
        raise EngineError(f'GPU memory must be {{"gpu", "memory", "tensors"}}, got {str(told)[:100]}')
    here = gpu_name(torch.cuda.current_device()) if torch.cuda.is_available() else "no GPU"
    if gpu != here:
        raise EngineError(f"the weights are in the memory of {gpu}, and this vLLM worker uses {here}")
    try:
        bytes_of_it = _mapped(json.dumps(memory))
    except Exception as error:  # torch raises many types here
        raise EngineError(f"the trainer's memory of {gpu} cannot be opened by CUDA IPC: {error}") from error
    entries = {tensor: _entry(tensor, one, len(bytes_of_it)) for tensor, one in tensors.items()}

    def read(tensor: str) -> torch.Tensor:
        dtype, shape, offset = entries[tensor]
        return bytes_of_it[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    index = {tensor: (dtype, shape) for tensor, (dtype, shape, _) in entries.items()}
    offsets = {tensor: offset for tensor, (_, _, offset) in entries.items()}
    return Weights(f"the memory of {gpu}", index, read, memory=Memory(bytes_of_it, offsets))


@functools.lru_cache(maxsize=1)  # a trainer shares the same memory for all versions
def _mapped(memory: str) -> torch.Tensor:
    """Return the bytes of the memory that a trainer described with `CudaWeights.info`."""
    parts = [base64.b64decode(one[1:]) if isinstance(one, str) else one for one in json.loads(memory)]
    device = torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)


def gpu_name(number: int) -> str:
    """Return the name of a GPU that is the same in all processes, whichever GPUs they see."""
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


def _entry(tensor: str, told: Any, length: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Check and return one index entry, so that a wrong one cannot read beyond the memory or from other bytes."""
    try:
        dtype, shape, offset = told["dtype"], tuple(told["shape"]), told["offset"]
    except (TypeError, KeyError) as error:
        raise EngineError(f'{tensor}: expected {{"dtype", "shape", "offset"}}, got {str(told)[:100]}') from error
    if dtype not in DTYPES:
        raise EngineError(f"{tensor}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in (*shape, offset)):
        raise EngineError(f"{tensor}: shape {shape} and offset {offset} must be integers of at least 0")
    size = DTYPES[dtype].itemsize
    end = offset + math.prod(shape) * size
    if end > length or offset % size:
        raise EngineError(
            f"{tensor}: {dtype} {shape} at offset {offset} ends at byte {end}, the shared memory has {length} bytes"
            + (f", and the offset is not a multiple of {size}" if offset % size else "")
        )
    return DTYPES[dtype], shape, offset
