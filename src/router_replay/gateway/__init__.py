"""A gateway for agents: OpenAI's routes in front of an engine, and the trajectories of every session for a trainer.

Names are imported on first use, so that a trainer that only reads sessions does not need aiohttp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {"Gateway": "gateway", "GatewayServer": "server", "read_session": "export"}

__all__ = ["Gateway", "GatewayServer", "read_session"]

if TYPE_CHECKING:
    from router_replay.gateway.export import read_session as read_session
    from router_replay.gateway.gateway import Gateway as Gateway
    from router_replay.gateway.server import GatewayServer as GatewayServer


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
