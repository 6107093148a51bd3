"""Provides EnginePool: several engines of one model behind the protocol of one."""

from router_replay.engines.pool.pool import EnginePool as EnginePool

__all__ = ["EnginePool"]
