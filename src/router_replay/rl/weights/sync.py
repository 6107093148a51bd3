"""Give the engine the policy's new weights, in the engine's dtype and rounded if its rollouts use FP8.

Routers stay in float32 on request.

The embedded engine takes the tensors directly. vLLM in this process reads them from memory of the GPU that both use, or
from shared memory, and a server reads them from a Hugging Face folder. Each tensor is cast and written when it is read,
so none of the ways needs another copy of the model than the one that the engine reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from router_replay.engines.base import Engine, WeightSource
from router_replay.engines.lazy_tensors import LazyTensors, like_of
from router_replay.engines.pieces import pieces_of
from router_replay.engines.shared_memory import SHARED_MEMORY, own_prefix, roomy, sweep
from router_replay.engines.types import InFlight
from router_replay.engines.vllm.client import VllmClient
from router_replay.errors import ConfigError, EngineError
from router_replay.rl.config import EngineConfig
from router_replay.rl.weights.files import write_folder
from router_replay.rl.weights.fp8 import fp8_rounded
from router_replay.rl.weights.held import counted
from router_replay.rl.weights.shared import Segment
from router_replay.rl.weights.ways import WORDS, Way, first_way, why_not_cuda_ipc


class WeightSync:
    """Give an engine each new version of the policy. Only the first rank has this object.

    `routers` are the names of the modules that route; their weights are never rounded to FP8. The attribute `way` says
    how versions reach the engine.
    """

    def __init__(
        self, config: EngineConfig, model: Any, routers: frozenset[str], *, float32_routers: bool = False
    ) -> None:
        self._config, self._model, self._routers = config, model, routers
        self._float32_routers = float32_routers
        self._pieces = pieces_of(model)
        self._segment = Segment(self._pieces)
        self.way: Way = first_way(config)
        wanted = [pathlib.Path(config.weights)] if config.weights else []
        for folder in {SHARED_MEMORY, pathlib.Path(tempfile.gettempdir()), *wanted}:  # all folders a run may use
            sweep(folder)
        bytes_of_two = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._closing.close)
            self._root = self._folder_in_use(_roomy(config.weights, bytes_of_two))
            on_failure.pop_all()

    def _folder_in_use(self, where: str | None) -> pathlib.Path:
        """Create a folder named after process and host, and lock it, so that no `sweep` treats it as a leftover."""
        try:
            made = tempfile.mkdtemp(prefix=own_prefix(), dir=where)
        except OSError as error:
            raise ConfigError(
                f"engine.weights: {where or tempfile.gettempdir()} cannot be written to ({error.strerror}); set it to "
                "a folder that engine and trainer can both use"
            ) from error
        self._closing.callback(shutil.rmtree, made, ignore_errors=True)
        in_use = os.open(made, os.O_RDONLY)
        self._closing.callback(os.close, in_use)
        with contextlib.suppress(OSError):  # without file locks, `sweep` checks process and host
            fcntl.flock(in_use, fcntl.LOCK_SH)
        return pathlib.Path(made)

    def export(self, state: Mapping[str, torch.Tensor], version: int) -> pathlib.Path:
        """Write the weights as the engine needs them and return the folder; it stays until the next version exists."""
        folder = self._root / f"version_{version}"
        try:
            write_folder(self._model, self.for_engine(state), folder, self._pieces)
        except Exception as error:  # transformers and the system report a full disk with their own types
            shutil.rmtree(folder, ignore_errors=True)
            reason = str(error).strip().partition("\n")[0]
            raise EngineError(
                f"the weights for the engine could not be written to {folder}: {reason}. Free some space, or set "
                "engine.weights to another folder"
            ) from error
        return folder

    def prepare(self, engines: Sequence[Engine], state: Mapping[str, torch.Tensor], gpu: int | None) -> str:
        """Choose the way to these running `engines`, allocate what it takes, and return it in words.

        `state` has the names and shapes of the weights, which are on GPU number `gpu`, or on a CPU if it is None.
        Raises ConfigError if `engine.transfer` asks for a way that is not possible. Without this call, weights take
        the way for an engine of which only the settings are known.
        """
        asked, inside = self._config.transfer, self._config.kind == "vllm"
        like, reasons = self.for_engine(state), []
        if asked == "cuda_ipc" or (asked == "auto" and inside):
            why_not = why_not_cuda_ipc(engines, gpu) or self._why_not_mapped(engines, like, gpu)
            if not why_not:
                self.way = "cuda_ipc"
                return WORDS[self.way]
            if asked == "cuda_ipc":
                raise ConfigError(f'engine.transfer = "cuda_ipc" is not possible: {why_not}. Set it to "auto"')
            if gpu is not None:
                reasons.append(f"not {WORDS['cuda_ipc']}: {why_not}")
        if inside and asked != "folder":
            try:
                self._segment.allocate(like)
            except EngineError as error:
                if asked == "shared_memory":
                    raise ConfigError(f'engine.transfer = "shared_memory" is not possible: {error}') from error
                self.way = "folder"
                reasons.append(f"not {WORDS['shared_memory']}: {error}")
        return WORDS[self.way] + (f" ({'; '.join(reasons)})" if reasons else "")

    def _why_not_mapped(self, engines: Sequence[Engine], like: LazyTensors, gpu: int | None) -> str:
        """Allocate memory of the GPU and let the engines map it. Return why that fails, or an empty text."""
        try:
            memory = self._segment.allocate(like, gpu)
            for engine in engines:
                cast(VllmClient, engine).check_weights(memory)
        except EngineError as error:
            self._segment.close()
            return str(error)
        return ""

    def push(
        self, engine: Engine, state: Mapping[str, torch.Tensor], version: int, in_flight: InFlight = "abort"
    ) -> None:
        """Load the weights of `state` into the engine as this version, and remove the files of older ones.

        `in_flight` says what happens to running requests.
        """
        engine.update_weights(self.source(state, version), version, in_flight)
        self.remove_older(version)

    def source(self, state: Mapping[str, torch.Tensor], version: int, *, as_folder: bool = False) -> WeightSource:
        """Return the weights of `state` in the form that the engine loads fastest.

        The tensors of an embedded engine are read from `state` while it loads. `as_folder` is for an engine that loads
        them later, or in another process: it takes a folder whatever its kind.
        """
        way: Way = "folder" if as_folder else self.way
        if way == "tensors":
            return self.for_engine(state)
        if way != "folder" and (memory := self._segment.write(self.for_engine(state))) is not None:
            return memory
        return str(self.export(state, version))

    def remove_older(self, version: int) -> None:
        """Remove the folders of other versions than this one."""
        for old in self._root.glob("version_*"):
            if old.name != f"version_{version}":
                shutil.rmtree(old)

    def for_engine(self, state: Mapping[str, torch.Tensor]) -> LazyTensors:
        """Return the weights in the dtype of the engine, rounded to FP8 blocks if `engine.quantize` says so.

        Each is cast when it is read.
        """
        rounds = self._config.quantize == "fp8"

        def read(name: str) -> torch.Tensor:
            tensor = state[name]
            if rounds and self._is_quantised(name, tensor):
                tensor = counted(fp8_rounded(tensor))
            return counted(tensor.to(self._dtype_of(name)))

        like = {
            name: torch.empty(tensor.shape, dtype=self._dtype_of(name), device="meta")
            for name, tensor in like_of(state).items()
        }
        return LazyTensors(like, read)

    def close(self) -> None:
        """Free the memory of the weights, and remove their folder. The engine must not read from it any more."""
        self._segment.close()
        self._closing.close()

    def _is_quantised(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether FP8 checkpoints quantise this tensor.

        They quantise the matrices of attention and experts, but not routers, norms, embeddings and the head.
        """
        kept = self._is_router(name) or "embed" in name or "lm_head" in name
        return tensor.ndim >= 2 and not kept

    def _dtype_of(self, name: str) -> torch.dtype:
        in_float32 = self._float32_routers and self._is_router(name)
        return torch.float32 if in_float32 else getattr(torch, self._config.dtype)

    def _is_router(self, name: str) -> bool:
        return any(name.startswith(f"{router}.") for router in self._routers)


def _roomy(wanted: str, needed: int) -> str | None:
    """Return the requested folder, or where there is room if none was requested."""
    if wanted:
        try:
            pathlib.Path(wanted).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"engine.weights = {wanted!r} cannot be created as a folder: {error}") from error
        return wanted
    return roomy(needed)
