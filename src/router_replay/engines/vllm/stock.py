"""Loads new weights into a stock vLLM server, one without our plugin, where its own transfer backends can.

The server decides how, when it starts: `--weight-transfer-config '{"backend": "ipc"}'` for a trainer on the same GPU,
"nccl" for one on another GPU. `why_no_weights` reads from /server_info why a server cannot. A stock server neither
checks weights before it drops the old ones nor says which tokens of a kept request have which version, so the client
checks what it can: names and shapes before the update, every answer, the prefix cache, and one prompt afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from router_replay.engines.backend import Flight, Progress
from router_replay.engines.base import WeightSource
from router_replay.engines.http import Http
from router_replay.engines.types import LOWEST_LOGPROB, Request, Sampling
from router_replay.engines.vllm.client import Transport, VllmBackend, broken
from router_replay.errors import EngineError

if TYPE_CHECKING:
    from router_replay.engines.vllm.plugin.weights.sources import Weights
    from router_replay.engines.vllm.transfer import Sender

OLDEST = (0, 28)  # before, vLLM's transfers had another form
BACKENDS = ("ipc", "nccl")
INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
# The same answer, to the bit, after most tensors have changed means that the server still computes with the old ones.
PROBE = Request(tuple(range(8)), Sampling(max_tokens=8, temperature=0.0, ignore_eos=True), id="a check of new weights")


@dataclasses.dataclass(frozen=True)
class Stock:
    """Holds what the client knows of new weights for a stock server: `why_not` it takes none, or else how it does.

    `backend` is the server's transfer backend, `ranks` the number of its workers, `folder` its model, and `gpu` the
    number of the GPU from which this process sends.
    """

    why_not: str
    backend: str = ""
    ranks: int = 1
    folder: str | None = None
    gpu: int = 0


def read_stock(info: Mapping[str, Any], version: tuple[int, ...], folder: str | None, gpu: int) -> Stock:
    """Return how a stock server takes new weights, from its /server_info (empty if it has none).

    `version` is that of its vLLM, `folder` the model that it names, and `gpu` the GPU of this process.
    """
    config = _part(info, "vllm_config")
    parallel = _part(config, "parallel_config")
    backend = _part(config, "weight_transfer_config").get("backend")
    sizes = [parallel.get("world_size", 1), parallel.get("data_parallel_size", 1)]
    ranks = math.prod(size if isinstance(size, int) else 1 for size in sizes)
    why_not = _why_not(info, version, backend, ranks)
    return Stock(why_not, "" if why_not else str(backend), ranks, folder, gpu)


def _why_not(info: Mapping[str, Any], version: tuple[int, ...], backend: Any, ranks: int) -> str:
    config = _part(info, "vllm_config")
    device = _part(config, "device_config").get("device")
    if not isinstance(device, str):
        return "the server does not say on which device it computes (it does with VLLM_SERVER_DEV_MODE=1)"
    if device.startswith("cpu"):
        return (
            "the server computes on a CPU, where vLLM's own weight updates report success and give wrong experts: the "
            "new ones are not packed again for its CPU kernel"
        )
    if not device.startswith("cuda"):
        return f"the server computes on {device[:40]!r}, and vLLM's transfers were used on CUDA GPUs only"
    if version < OLDEST:
        return f"before vLLM {OLDEST[0]}.{OLDEST[1]} its weight transfers have another form"
    if backend not in BACKENDS:
        told = "none" if backend is None else repr(backend)[:40]
        return (
            f"the server's transfer backend is {told}: start it with --weight-transfer-config "
            '\'{"backend": "ipc"}\' for a trainer on the same GPU, or "nccl" for one on another GPU'
        )
    quantization = _part(config, "model_config").get("quantization")
    if quantization is not None:
        return f"the server quantizes its weights ({str(quantization)[:40]}), and was not tried with new ones"
    if backend == "ipc" and not _part(info, "vllm_env").get(INSECURE):
        return f"the server's transfer backend ipc takes handles over HTTP only with {INSECURE}=1"
    if backend == "ipc" and ranks != 1:
        return (
            f"the server has {ranks} workers, and ipc reaches the one on the trainer's GPU only: start the server "
            "with the transfer backend nccl"
        )
    return ""


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = told.get(name)
    return part if isinstance(part, dict) else {}


def _reason(error: Exception) -> str:
    return str(error) or repr(error)  # a timeout has no text


def current_gpu() -> int:
    """Return the number of the calling thread's GPU, without starting CUDA in a process that does not use it."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


class StockBackend(VllmBackend):
    """Implements the Backend calls for a stock server. New weights go by vLLM's transfers."""

    aborts_after_load = False  # the check of new weights lets the server compute

    def __init__(self, transport: Transport, http: Http, stock: Stock, no_plugin: str) -> None:
        super().__init__(transport)
        self._http, self._stock, self._no_plugin = http, stock, no_plugin
        self.takes_tensors = not stock.why_not
        self._sender: Sender | None = None
        self._layout: dict[str, tuple[int, ...]] | None = None
        self._last: tuple[dict[str, int], tuple[Any, ...]] | None = None

    async def find(self, source: WeightSource) -> None:
        """Raise EngineError if the server takes no weights, or if these cannot be read or have another layout."""
        if self._stock.why_not:
            raise EngineError(f"{self._no_plugin}. By vLLM's own transfer it cannot be: {self._stock.why_not}")
        from router_replay.engines.vllm.transfer import opened, sender

        if self._sender is None:
            self._sender = sender(self._stock.backend, self._http, self._stock.gpu, self._stock.ranks)
        weights = await asyncio.to_thread(opened, source)
        if self._layout is None:
            self._layout = await asyncio.to_thread(self._layout_of_server)
        if self._layout is not None:
            self._compare(weights, self._layout)

    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Send the weights, reset the prefix cache, and check the answer to one prompt."""
        if kept:
            raise EngineError(
                "in_flight='keep' would mix two policies in one answer, and a stock vLLM server does not say which "
                "tokens come from which: pass in_flight='abort' or 'wait', or start it with router-replay serve"
            )
        from router_replay.engines.vllm.transfer import opened

        assert self._sender is not None, "find comes first"
        weights = await asyncio.to_thread(opened, source)
        try:
            await self._sender.prepare(weights)
        except Exception as error:
            raise EngineError(
                f"the transfer of weights could not begin, and the old ones are still in use: {_reason(error)}"
            ) from error
        try:
            sums = await self._sender.send(weights)
            reset = await self.transport.reset_prefix_cache()
        except Exception as error:
            raise broken(
                f"sending {weights.where} failed, so it is unknown which weights vLLM has: {_reason(error)}"
            ) from error
        if not reset:
            raise broken(
                "vLLM did not reset its prefix cache after the weight update, so KV of the old weights would be used"
            )
        self._updates += 1
        if self._layout is None:  # its folder is not on this machine, so the first update counts as complete
            self._layout = {name: shape for name, (_, shape) in weights.index.items()}
        await self._check(sums)
        return {}

    def _layout_of_server(self) -> dict[str, tuple[int, ...]] | None:
        """Return names and shapes in the server's model folder, if it is on this machine and has safetensors."""
        from router_replay.engines.vllm.plugin.weights.sources import open_source

        folder = self._stock.folder
        if not folder or not any(pathlib.Path(folder).glob("*.safetensors")):
            return None
        return {name: shape for name, (_, shape) in open_source({"path": folder}).index.items()}

    def _beyond(self, name: str) -> bool:
        """Return whether a tensor belongs to a layer after the last one, which a draft model uses and no policy has."""
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= self.spec.engine_layers

    def _compare(self, weights: Weights, layout: Mapping[str, tuple[int, ...]]) -> None:
        """Raise EngineError for a layout that differs; vLLM would leave what is missing as it is, or uninitialised."""
        missing = {name for name in layout.keys() - weights.index.keys() if not self._beyond(name)}
        unknown = weights.index.keys() - layout.keys()
        for wrong, what in ((missing, "not in them"), (unknown, "in them alone")):
            if wrong:
                names = ", ".join(sorted(wrong)[:5])
                raise EngineError(
                    f"expected the {len(layout)} tensors of the server's model, got {len(weights.index)} in "
                    f"{weights.where}; {len(wrong)} {what}: {names}. Pass a folder that save_pretrained wrote"
                )
        for name, (_, shape) in weights.index.items():
            if shape != layout[name]:
                raise EngineError(
                    f"{name} in {weights.where} has shape {list(shape)}, expected {list(layout[name])} as in the "
                    "server's model"
                )

    async def _check(self, sums: dict[str, int]) -> None:
        """Ask one prompt, and raise if the server computes with broken weights, or still with the old ones."""
        try:
            answer = await self._probe()
        except Exception as error:
            raise broken(f"vLLM took the new weights, and then failed at a request: {_reason(error)}") from error
        if not all(math.isfinite(logprob) and logprob > LOWEST_LOGPROB for logprob in answer[1]):
            raise broken(f"with its new weights vLLM samples tokens whose log-probs are {list(answer[1])}")
        last, self._last = self._last, (sums, answer)
        if last is None:
            return
        changed = sum(number != last[0].get(name) for name, number in sums.items())
        if 2 * changed > len(sums) and answer == last[1]:
            raise broken(
                f"{changed} of {len(sums)} tensors changed, but vLLM answers a prompt as before, to the bit: it "
                "computes with the old weights"
            )

    async def _probe(self) -> tuple[Any, ...]:
        """Return tokens and log-probs of the likeliest answer to a fixed prompt. The server is held, before and after.

        Other requests of this engine do not start meanwhile.
        """
        flight = Flight(PROBE)
        flight.salt = flight.name
        await self.transport.resume()
        try:
            [sample] = await self.transport.generate(flight)
        finally:
            await self.transport.pause("keep")
        return tuple(sample.token_ids), tuple(sample.logprobs)
