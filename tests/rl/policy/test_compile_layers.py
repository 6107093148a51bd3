"""Compiled decoder layers: one graph for all layers and all bins, and the results of the plain layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from router_replay.rl.policy import delivery
from router_replay.rl.policy.models import compile_layers
from router_replay.rl.policy.policy import Policy
from tests.rl.policy.test_policy import ONE, samples
from tests.rl.policy.test_policy import make as make  # the fixture


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("mode", "checkpointing"), [("r3", "non_reentrant"), ("r2", "off")])
def test_all_layers_and_bins_share_the_graphs_of_the_first_step(
    make: Callable[..., Policy], mode: str, checkpointing: str
) -> None:
    how = ("model.dtype=bfloat16", "model.attention=masked")  # attention by groups, as on a CPU, is not compiled
    settings = (f"replay={mode}", *how, f"model.gradient_checkpointing={checkpointing}")
    plain, compiled = make(*settings), make(*settings)
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(compiled.model, backend=counter)
    graphs = []
    for kept in (3, 2):  # bins of different lengths
        minis = [delivery.plan([samples(one)[:kept]], ONE, 64, "raise")[0][0] for one in (plain, compiled)]
        expected, got = (one.update(mini, one.score(mini)) for one, mini in zip((plain, compiled), minis, strict=True))
        assert math.isclose(got["grad_norm"], expected["grad_norm"], rel_tol=0.05)
        counts = [one.route_counts() for one in (plain, compiled)]
        assert counts[0].rows_replayed == counts[1].rows_replayed
        assert counts[0].passes == counts[1].passes
        figures = [one.router_figures() for one in (plain, compiled)]
        assert figures[0] is not None
        assert figures[1] is not None
        assert figures[0].rows == figures[1].rows == sum(len(one) - 1 for one in samples(plain)[:kept])
        assert figures[1].confidence == pytest.approx(figures[0].confidence, rel=0.05)
        assert figures[1].load.sum() == figures[0].load.sum()
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]
    assert graphs[0] <= 6  # a graph for each of 3 layers, in score, update and recompute, would be more
