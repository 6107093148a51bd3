"""Replay routes in the routers of a Megatron-core model, and record the routes that they choose."""

from router_replay.batch.megatron import MegatronLayout as MegatronLayout
from router_replay.batch.megatron import Share as Share
from router_replay.replay.megatron.native import install as install
from router_replay.replay.megatron.replayer import MegatronReplay as MegatronReplay

__all__ = ["MegatronLayout", "MegatronReplay", "Share", "install"]
