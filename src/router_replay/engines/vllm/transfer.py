"""Sends a trainer's weights to a stock vLLM server by vLLM's own transfer backends, "ipc" and "nccl".

Both are vLLM's published protocol: /init_weight_transfer_engine, /start_weight_update, /update_weights for every part,
/finish_weight_update. By CUDA IPC the server's worker maps a buffer of this process on the same GPU; the handle is a
small pickle, so vLLM need not be installed here. By NCCL this process is rank 0 of a group with all workers of the
server, which are on other GPUs; vLLM's own trainer side does that, so vLLM must be installed here too.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import math
import pickle
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from router_replay.engines.base import SharedTensors, WeightSource
from router_replay.engines.checks import folder
from router_replay.engines.http import Http
from router_replay.engines.vllm.plugin.weights.sources import Index, Weights, open_source
from router_replay.errors import EngineError

BUFFER = 256 << 20  # bytes of weights in one part; a larger tensor is a part of its own


def opened(source: WeightSource) -> Weights:
    """Return the weights of a folder, a file, shared memory or a mapping of names to whole tensors.

    Larger number types come first: vLLM reads the tensors of a part at their place in one buffer, where a float32
    tensor after an odd number of bfloat16 values would not be aligned.
    """
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
                raise EngineError(f"{name}: expected a whole torch tensor, got {type(tensor).__name__}")
        index: Index = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in source.items()}
        weights = Weights("the given tensors", index, source.__getitem__)
    else:
        weights = open_source(source.info() if isinstance(source, SharedTensors) else {"path": folder(source)})
    if not weights.index:
        raise EngineError(f"{weights.where}: there are no weights, expected at least one tensor")
    ordered = sorted(weights.index.items(), key=lambda entry: -entry[1][0].itemsize)
    return Weights(weights.where, dict(ordered), weights.read)


def size_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)


def sent_as(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape under which a tensor is sent: vLLM cannot unpack one without dimensions."""
    return shape or (1,)


def parts_of(index: Index, limit: int) -> list[list[str]]:
    """Split the names into consecutive parts of at most `limit` bytes; a larger tensor is a part of its own."""
    parts: list[list[str]] = []
    room = -1
    for name, entry in index.items():
        size = size_of(*entry)
        if size > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    return parts


def pack_part(weights: Weights, names: list[str], buffer: torch.Tensor) -> dict[str, Any]:
    """Copy these tensors into the buffer of bytes, one after the other, and return their description for vLLM."""
    place, sizes = 0, []
    for name in names:
        bytes_of_it = weights.read(name).detach().reshape(-1).view(torch.uint8)
        buffer[place : place + len(bytes_of_it)].copy_(bytes_of_it)
        place += len(bytes_of_it)
        sizes.append(len(bytes_of_it))
    told = [weights.index[name] for name in names]
    return {
        "names": names,
        "dtype_names": [str(dtype).removeprefix("torch.") for dtype, _ in told],
        "shapes": [list(sent_as(shape)) for _, shape in told],
        "tensor_sizes": sizes,
    }


class Sums:
    """Collects one number per tensor, the sum of its bytes, to see at the next update which tensors changed."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, bytes_of_it: torch.Tensor) -> None:
        """Sum the bytes of a tensor where it is, without waiting for the result."""
        self._sums[name] = bytes_of_it.sum(dtype=torch.int64)

    def read(self) -> dict[str, int]:
        """Return the sums of all tensors."""
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))


class Sender(abc.ABC):
    """Sends weights to the server behind `http` from GPU number `gpu` of this process.

    `prepare` changes no weight of the server. A failure of `send` leaves it unknown which weights the server has.
    """

    def __init__(self, http: Http, gpu: int) -> None:
        self._http, self._device = http, torch.device("cuda", gpu)

    @abc.abstractmethod
    async def prepare(self, weights: Weights) -> None:
        """Do what can fail before the server drops its old weights."""

    @abc.abstractmethod
    async def send(self, weights: Weights) -> dict[str, int]:
        """Replace the weights of the server by these, and return one number for each tensor, of its content."""

    async def _post(self, path: str, body: Any = None) -> None:
        await self._http.expect("POST", path, body, patient=True)

    def _synchronize(self) -> None:
        """Wait for the GPU: others read what it writes, in another process or on streams of their own."""
        torch.cuda.synchronize(self._device)


def sender(backend: str, http: Http, gpu: int, ranks: int) -> Sender:
    """Return the sender for the server's transfer backend. `ranks` is the number of the server's workers."""
    if not torch.cuda.is_available():
        raise EngineError(
            f"the server takes new weights from a GPU (its transfer backend is {backend!r}), and torch finds no CUDA "
            "GPU in this process: run the trainer on a GPU, or start the server with router-replay serve"
        )
    return CudaIpc(http, gpu) if backend == "ipc" else Nccl(http, gpu, ranks)


class CudaIpc(Sender):
    """Sends weights through a buffer on the GPU that the server's only worker computes on."""

    _buffer: torch.Tensor
    _handles: str

    async def prepare(self, weights: Weights) -> None:
        """Allocate the buffer, for this update only, and tell the server that parts come packed."""
        await asyncio.to_thread(self._allocate, max(size_of(*entry) for entry in weights.index.values()))
        await self._post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def _allocate(self, largest: int) -> None:
        self._buffer = torch.empty(max(BUFFER, largest), dtype=torch.uint8, device=self._device)
        _, arguments = reduce_tensor(self._buffer)
        handles = {str(torch.cuda.get_device_properties(self._device).uuid): arguments}
        self._handles = base64.b64encode(pickle.dumps(handles)).decode()

    async def send(self, weights: Weights) -> dict[str, int]:
        """Send the weights part by part. The server has copied a part when it answers, so the buffer is used again."""
        sums = Sums()
        try:
            await self._post("/start_weight_update")
            for names in parts_of(weights.index, BUFFER):
                told = await asyncio.to_thread(self._fill, weights, names, sums)
                await self._post("/update_weights", {"update_info": {**told, "ipc_handles_pickled": self._handles}})
            await self._post("/finish_weight_update")
            return sums.read()
        finally:
            await asyncio.to_thread(self._free)

    def _fill(self, weights: Weights, names: list[str], sums: Sums) -> dict[str, Any]:
        told = pack_part(weights, names, self._buffer)
        used = self._buffer[: sum(told["tensor_sizes"])]
        for name, piece in zip(names, used.split(told["tensor_sizes"]), strict=True):
            sums.add(name, piece)
        self._synchronize()
        return told

    def _free(self) -> None:
        del self._buffer
        torch.cuda.ipc_collect()


class Nccl(Sender):
    """Broadcasts weights to all workers of the server, through the trainer side that vLLM publishes."""

    def __init__(self, http: Http, gpu: int, ranks: int) -> None:
        super().__init__(http, gpu)
        self._ranks = ranks
        self._weights: Weights | None = None
        self._sums = Sums()
        self._trainer: Any = None

    async def prepare(self, weights: Weights) -> None:
        """Join the group with the server's workers, once."""
        if self._trainer is None:
            self._trainer = await self._in_thread(self._join)

    async def send(self, weights: Weights) -> dict[str, int]:
        """Start the update, broadcast, and finish it."""
        self._weights, self._sums = weights, Sums()
        await self._in_thread(self._broadcast)
        self._weights = None
        return self._sums.read()

    def _broadcast(self) -> None:
        self._synchronize()
        self._trainer.send_weights()

    def _join(self) -> Any:
        try:
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )
        except ImportError as error:
            raise EngineError(
                "sending weights by NCCL needs vLLM 0.28 or later in the trainer's environment too, for its trainer "
                f"side ({error}): install it, or start the server with the transfer backend ipc on the trainer's GPU"
            ) from error
        address, port = _address_towards(self._http.url)
        told = NCCLTrainerInitInfo(
            rank=0,
            master_address=address,
            master_port=port,
            world_size=1 + self._ranks,
            packed_buffer_size_bytes=BUFFER,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(told, client=self, source=self)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in a daemon thread: a broadcast that a dead server never joins must not keep the process alive."""
        self._loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            result, failure = None, None
            try:
                with self._current_device(), torch.no_grad():
                    result = work()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the engine was closed, and its loop with it
                self._loop.call_soon_threadsafe(self._end, done, result, failure)

        threading.Thread(target=run, name="router-replay-nccl", daemon=True).start()
        return await asyncio.wait_for(done, self._http.timeout)

    def _current_device(self) -> AbstractContextManager[Any]:
        """Return a block in which vLLM finds the GPU to send from."""
        return torch.cuda.device(self._device)

    @staticmethod
    def _end(done: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
        if done.done():
            return
        done.set_result(result) if failure is None else done.set_exception(failure)

    # -- what vLLM's trainer side takes as its source: the names, and the tensors on the GPU in the same order --

    def metadata(self) -> list[Any]:
        """Return the name, dtype and shape of each tensor, in the order of the iteration."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        assert self._weights is not None
        return [ParamMeta(name, dtype, sent_as(shape)) for name, (dtype, shape) in self._weights.index.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._weights is not None
        for name in self._weights.index:
            tensor = self._weights.read(name).detach().to(self._device).contiguous()
            self._sums.add(name, tensor.reshape(-1).view(torch.uint8))
            yield name, tensor.reshape(sent_as(tuple(tensor.shape)))

    # -- what vLLM's trainer side takes as its client: the calls of the server, made from its threads --

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell the server's workers to join the group."""
        self._call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Tell the server that new weights come."""
        self._call("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Tell the server's workers to receive these tensors."""
        self._call("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the server that all weights have come."""
        self._call("/finish_weight_update")

    def _call(self, path: str, body: Any = None) -> None:
        asyncio.run_coroutine_threadsafe(self._post(path, body), self._loop).result()


def _address_towards(url: str) -> tuple[str, int]:
    """Return this machine's address on the way to the server, and a free port, where the workers find this process."""
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    [(family, _, _, _, where), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(where)  # sends nothing
        address = way.getsockname()[0]
    with socket.socket(family) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
