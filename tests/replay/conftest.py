"""One tiny model and its replayer, for the tests of RouterReplay in one family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from router_replay import Routes
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny


@pytest.fixture
def model() -> Any:
    torch.set_num_threads(1)
    return tiny.make("qwen3_moe")


@pytest.fixture
def replayer(model: tiny.Tiny) -> RouterReplay:
    return RouterReplay(model.model)


def routes_for(replayer: RouterReplay, model: tiny.Tiny, seed: int = 0) -> Routes:
    return random_routes(model.tokens, replayer.spec, seed)
