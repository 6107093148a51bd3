"""Keeps routes by the content of their tokens, for trainers that move tokens but not rows."""

from router_replay.store.store import RouteStore as RouteStore

__all__ = ["RouteStore"]
