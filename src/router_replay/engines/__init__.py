"""Rollout engines behind one protocol."""

from router_replay.engines.base import Capabilities as Capabilities
from router_replay.engines.base import Completion as Completion
from router_replay.engines.base import Engine as Engine
from router_replay.engines.base import Request as Request
from router_replay.engines.base import Sampling as Sampling

__all__ = ["Capabilities", "Completion", "Engine", "Request", "Sampling"]
