"""Router Replay: record the experts a rollout used, replay them in the trainer, and prove that it happened.

Names are loaded when first used, so that an environment server that only moves bytes never imports
torch, and `import router_replay` costs a few milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the only place: pyproject.toml reads it

_HOMES = {
    "RouterSpec": "router_replay.spec",
    "Routes": "router_replay.routes",
    "Trajectory": "router_replay.stitch",
    "Batch": "router_replay.batch",
    "Sample": "router_replay.batch",
    "pack": "router_replay.batch",
    "RouteStore": "router_replay.store",
    "RouterReplay": "router_replay.replay",
    "Ulysses": "router_replay.forward",
    "logprobs": "router_replay.forward",
    "RouterReplayError": "router_replay.errors",
}
_MODULES = ("engines", "measure", "recording", "wire")

__all__ = [
    "Batch",
    "RouteStore",
    "RouterReplay",
    "RouterReplayError",
    "RouterSpec",
    "Routes",
    "Sample",
    "Trajectory",
    "Ulysses",
    "engines",
    "logprobs",
    "measure",
    "pack",
    "recording",
    "wire",
]

if TYPE_CHECKING:
    from router_replay import engines as engines
    from router_replay import measure as measure
    from router_replay import recording as recording
    from router_replay import wire as wire
    from router_replay.batch import Batch as Batch
    from router_replay.batch import Sample as Sample
    from router_replay.batch import pack as pack
    from router_replay.errors import RouterReplayError as RouterReplayError
    from router_replay.forward.logprobs import logprobs as logprobs
    from router_replay.forward.ulysses import Ulysses as Ulysses
    from router_replay.replay import RouterReplay as RouterReplay
    from router_replay.routes import Routes as Routes
    from router_replay.spec import RouterSpec as RouterSpec
    from router_replay.stitch import Trajectory as Trajectory
    from router_replay.store import RouteStore as RouteStore


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"router_replay.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'router_replay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
