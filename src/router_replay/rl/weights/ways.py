"""Name the ways by which new weights reach an engine, and find out whether CUDA IPC is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from router_replay.engines.base import Engine
from router_replay.engines.vllm.client import VllmClient
from router_replay.engines.vllm.plugin.weights.sources import gpu_name
from router_replay.rl.config import EngineConfig

Way: TypeAlias = Literal["tensors", "cuda_ipc", "shared_memory", "folder"]
WORDS: dict[Way, str] = {
    "tensors": "as tensors",
    "cuda_ipc": "by CUDA IPC",
    "shared_memory": "by shared memory",
    "folder": "as a folder",
}


def first_way(config: EngineConfig) -> Way:
    """Return the way for an engine with these settings of which nothing else is known."""
    if config.transfer == "folder" or config.kind in config.behind_url:
        return "folder"
    return "tensors" if config.kind == "embedded" else "shared_memory"


def why_not_cuda_ipc(engines: Sequence[Engine], gpu: int | None) -> str:
    """Return why weights on GPU number `gpu` (None: on a CPU) cannot go to all `engines` by CUDA IPC, or an empty text.

    Every worker must map memory of the GPU that it computes on.
    """
    if gpu is None:
        return "the trainer computes on a CPU"
    here = gpu_name(gpu)
    for engine in engines:
        if not isinstance(engine, VllmClient):
            return f"{type(engine).__name__} does not take weights by CUDA IPC"
        if not engine.capabilities.checked_weights:
            return "the vLLM server runs without the plugin, which maps the memory"
        for there in engine.gpus():
            if there != here:
                return f"the trainer computes on {here}, and a worker of the engine on {there or 'a CPU'}"
    return ""
