"""Replay routes in the routers of a transformers model, and record the routes that they choose."""

import importlib
import warnings
from typing import Any

from router_replay.replay.replayer import RouterReplay as RouterReplay

__all__ = ["RouterReplay"]

_MOVED = ("Ulysses", "logprobs")  # moved to router_replay.forward; the old import works until the next release


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{name} has moved to router_replay.forward: import it from there; the next release removes the old path",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module("router_replay.forward"), name)
