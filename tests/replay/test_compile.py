"""torch.compile(fullgraph=True): one graph, right answers, and no second one for new routes or new holes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from router_replay import Routes
from router_replay.families import FAMILIES
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_ids, random_routes
from tests.replay import tiny

FORWARD_ONLY = ("doge", "qwen3_5_moe", "qwen3_next")  # the plain model's backward does not compile, its forward does
COMPILES = sorted({*(family.name for family in FAMILIES if family.compiles == "yes"), *FORWARD_ONLY})


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: tiny.Tiny, backend: str) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    model.model = torch.compile(model.model, backend=counter, fullgraph=True)
    return counter


@pytest.mark.parametrize("family", COMPILES)
def test_every_family_that_compiles_plain_compiles_replayed(family: str) -> None:
    model = tiny.make(family)
    model.model.set_experts_implementation("batched_mm")
    replayer = RouterReplay(model.model)
    given = [random_routes(model.tokens, replayer.spec, seed) for seed in (1, 2)]
    expected = []
    with torch.no_grad():
        for routes in given:
            with replayer.replay(routes):
                expected.append(model.forward())
        counter = compiled(model, "eager")
        frames = set()
        for routes, eager in zip(given, expected, strict=True):
            with replayer.replay(routes):
                assert torch.allclose(model.forward(), eager, atol=1e-5)
            frames.add(counter.frame_count)
    # Where the decoder stack itself is compiled, its hook that counts passes is a second, three-node graph.
    assert frames in ({1}, {2})
    assert replayer.stats.passes == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("holes", [False, True])
def test_backward_of_the_compiled_model(family: str, holes: bool) -> None:
    model = tiny.make(family)
    model.model.set_experts_implementation("batched_mm")
    replayer = RouterReplay(model.model)
    rng = np.random.default_rng(0)

    def routes(seed: int) -> Routes:
        captured = rng.random(model.tokens) < 0.7 if holes else None
        return Routes(random_ids(model.tokens, replayer.spec, seed), replayer.spec, captured=captured)

    def step(given: Routes) -> list[torch.Tensor]:
        model.model.zero_grad(set_to_none=True)
        with replayer.replay(given):
            model.forward().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.model.parameters() if parameter.grad is not None]

    given = [routes(seed) for seed in (1, 2, 3)]
    expected = [step(one) for one in given]
    counter = compiled(model, "aot_eager")
    for one, eager in zip(given, expected, strict=True):
        for mine, theirs in zip(step(one), eager, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4, rtol=1e-3)
        assert counter.frame_count == 1
