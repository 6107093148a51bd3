"""Every MoE family of transformers finds its rows by its tokens, and computes what `replay` computes, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from router_replay import Routes, RouteStore
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_ids
from tests.replay import tiny


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_a_pass_finds_its_rows_by_its_tokens(family: str) -> None:
    """The rows of the last token of each sequence are missing, as engines leave them."""
    model = tiny.make(family)
    replayer = RouterReplay(model.model)
    captured = np.tile(np.arange(tiny.LENGTH) < tiny.LENGTH - 1, tiny.BATCH)
    routes = Routes(random_ids(model.tokens, replayer.spec), replayer.spec, captured)
    store = RouteStore(replayer.spec)
    tokens = model.inputs.get("decoder_input_ids", model.inputs["input_ids"])
    for number in reversed(range(tiny.BATCH)):
        rows = routes[number * tiny.LENGTH : (number + 1) * tiny.LENGTH]
        store.add(tokens[number].tolist(), rows)
    live = model.forward()
    with replayer.replay(routes):
        expected = model.forward()
    with replayer.follow(store) as following:
        found = model.forward()
    assert torch.equal(found, expected)
    assert not torch.equal(found, live)
    assert following.metrics()["routes/replayed"] == captured.sum()
    assert following.metrics()["routes/live"] == 0
    assert replayer.stats.passes == 2
    assert torch.equal(model.forward(), live)
