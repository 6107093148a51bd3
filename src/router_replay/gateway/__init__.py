"""A gateway for agents: OpenAI's routes in front of an engine, and the trajectories of every session for a trainer."""

from router_replay.gateway.export import read_session as read_session
from router_replay.gateway.gateway import Gateway as Gateway
from router_replay.gateway.server import GatewayServer as GatewayServer

__all__ = ["Gateway", "GatewayServer", "read_session"]
