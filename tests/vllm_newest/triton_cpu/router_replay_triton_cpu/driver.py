"""The driver of the backend: it names the CPU as the device."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, DriverBase


class CpuDriver(DriverBase):
    """Answers Triton's questions about the current device."""

    @classmethod
    def is_active(cls) -> bool:
        return not torch.cuda.is_available()

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise RuntimeError("this Triton backend compiles nothing, so it has no C++ types")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Benchmarker:
        raise RuntimeError("kernels in Triton's interpreter are not tuned by timing them")
