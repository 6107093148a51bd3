"""Which families the installed transformers lets Router Replay find and replay, tried on their tiny models.

    python -m tests.families.found     # {"afmoe": {"found": true, "router": "AfmoeTokenChoiceRouter", ...}, ...}

`tools/family_versions.py` runs this under many versions of transformers.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pathlib
import sys

import torch

from router_replay.errors import RouterReplayError
from router_replay.families import measured
from router_replay.families.from_modules import find_routers
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny


@dataclasses.dataclass(frozen=True)
class Tried:
    found: bool
    why_not: str = ""
    router: str = ""  # the class of the module whose choice is replayed
    choice: str = ""
    own_loss: bool = False  # the family computes a load-balancing loss


def folders() -> set[str]:
    """The folders of transformers.models that name a router."""
    models = pathlib.Path(inspect.getfile(importlib.import_module("transformers.models"))).parent
    files = models.glob("*/modeling_*.py")
    return {file.parent.name for file in files if '"router_logits":' in file.read_text(encoding="utf-8")}


def try_family(family: str) -> Tried:
    """Whether forced routes come back from the family's tiny model. Versions that are said to fail are tried too."""
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:
        return Tried(False, "this transformers does not have it")
    try:
        model = tiny.build(family)
        with torch.no_grad():
            model.forward()
    except Exception as error:  # each version refuses what it does not know in its own way
        return Tried(False, f"its tiny model fails without replay: {error!r}")
    if problem := _replays(model):
        return Tried(False, problem)
    first = find_routers(model.model).routers[0]
    source = inspect.getsource(module)
    own_loss = "load_balancing_loss_func(" in source
    return Tried(True, "", type(first.module).__name__, first.choice.name.lower(), own_loss)


def _replays(model: tiny.Tiny) -> str:
    """Why forced routes do not come back; empty where they do."""
    try:
        replayer = RouterReplay(model.model)
        with replayer.record() as own, torch.no_grad():
            model.forward()
        routes = random_routes(model.tokens, replayer.spec)
        with replayer.replay(routes), replayer.record() as recording, torch.no_grad():
            model.forward()
    except RouterReplayError as error:  # anything else is a fault of ours
        return str(error)
    same = recording.routes == routes and own.routes != routes
    return "" if same else "the routes that were replayed are not those that were recorded"


def main() -> int:
    torch.set_num_threads(1)
    measured.FAMILIES.clear()  # or find_routers refuses by what was measured before
    json.dump({name: dataclasses.asdict(try_family(name)) for name in sorted(tiny.FAMILIES)}, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
