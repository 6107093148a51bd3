"""Provides the rollout engines, which all implement one protocol.

Names are imported on first use, so that an HTTP client does not need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from router_replay import _moved

_HOMES = {
    "Engine": "base",
    "Capabilities": "types",
    "Completion": "types",
    "Request": "types",
    "Sampling": "types",
    "VllmEngine": "vllm.inprocess",
    "VllmHttpEngine": "vllm.http",
    "SglangEngine": "sglang.engine",
    "DynamoEngine": "dynamo",
    "EmbeddedEngine": "embedded.engine",
    "EnginePool": "pool",
}

__all__ = [
    "Capabilities",
    "Completion",
    "DynamoEngine",
    "EmbeddedEngine",
    "Engine",
    "EnginePool",
    "Request",
    "Sampling",
    "SglangEngine",
    "VllmEngine",
    "VllmHttpEngine",
]

if TYPE_CHECKING:
    from router_replay.engines.base import Engine as Engine
    from router_replay.engines.dynamo import DynamoEngine as DynamoEngine
    from router_replay.engines.embedded.engine import EmbeddedEngine as EmbeddedEngine
    from router_replay.engines.pool import EnginePool as EnginePool
    from router_replay.engines.sglang.engine import SglangEngine as SglangEngine
    from router_replay.engines.types import Capabilities as Capabilities
    from router_replay.engines.types import Completion as Completion
    from router_replay.engines.types import Request as Request
    from router_replay.engines.types import Sampling as Sampling
    from router_replay.engines.vllm.http import VllmHttpEngine as VllmHttpEngine
    from router_replay.engines.vllm.inprocess import VllmEngine as VllmEngine

_moved.install()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
