"""Replay routes in the routers of a Megatron-core model, and record the routes that they choose."""

from router_replay.replay.megatron.layout import Layout as Layout
from router_replay.replay.megatron.layout import Share as Share
from router_replay.replay.megatron.replayer import MegatronReplay as MegatronReplay

__all__ = ["Layout", "MegatronReplay", "Share"]
