"""The compiler of the backend, which refuses to compile."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class InterpretedBackend(BaseBackend):
    """Has every method that Triton requires, and raises where a kernel would be compiled."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> None:
        raise RuntimeError("this Triton backend compiles nothing: set TRITON_INTERPRET=1 before vLLM starts")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
