"""Import this before verl: it lets verl 0.9.1, which knows GPUs and NPUs only, run on a CPU.

The platform answers for torch.cuda. The engine is looked up as on a GPU by nvidia, so the key that Router Replay
registers is the one that is tried.
"""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
os.environ["VERL_ENGINE_VENDOR"] = "nvidia"

import torch
from torch.distributed.fsdp import _init_utils
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

CPU = torch.device("cpu")  # not 0, which means cuda:0 to Tensor.to


def nothing(*_: Any) -> None:
    pass


def zero(*_: Any) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        Stream=torch.cpu.Stream,
        current_device=lambda: CPU,
        current_stream=torch.cpu.current_stream,
        device_count=lambda: 1,
        empty_cache=nothing,
        get_device_name=lambda *_: "CPU",
        get_rng_state=torch.get_rng_state,
        is_available=lambda: True,
        max_memory_allocated=zero,
        max_memory_reserved=zero,
        mem_get_info=lambda *_: (0, 0),
        memory_allocated=zero,
        memory_reserved=zero,
        set_device=nothing,
        set_rng_state=torch.set_rng_state,
        stream=torch.cpu.stream,
        synchronize=nothing,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CPU

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def _nothing(self, *_: Any) -> None:
        pass

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


# FSDP1 sends the weights of rank 0 to the others, which gloo can do, and refuses it for a module on the CPU.
assert callable(_init_utils._check_module_states_for_sync_module_states)
_init_utils._check_module_states_for_sync_module_states = nothing
