"""RoutingSums: the routing metrics of several processes are those of all their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from router_replay.integrations.routing import RoutingSums
from router_replay.replay.stats import Stats
from router_replay.spec import RouterSpec

SPEC = RouterSpec(num_experts=4, top_k=2, layers=(1, 3))


def passed(routing: RoutingSums, ids_TK: list[list[int]], agreement: tuple[float, float]) -> torch.Tensor:
    """A pass whose tokens use the experts `ids_TK` in both layers."""
    figures_2T = torch.stack([torch.full((len(ids_TK),), 0.5), torch.full((len(ids_TK),), 1.0)])
    routing.gauge.add([figures_2T] * 2, [torch.tensor(ids_TK)] * 2, None)
    rows = (len(ids_TK),) * 2
    return routing.sums(Stats(SPEC.layers, 1, rows, (0, 0), agreement, len(ids_TK)))


def test_the_figures_are_those_of_all_processes_and_passes() -> None:
    processes = [RoutingSums(SPEC), RoutingSums(SPEC)]
    first = sum(passed(one, ids, (1.0, 0.5)) for one, ids in zip(processes, ([[0, 1]] * 2, [[0, 2]] * 4), strict=True))
    assert processes[0].add(first).rows_replayed == (6, 6)
    processes[0].add(passed(processes[0], [[0, 3]] * 2, (0.0, 1.0)))
    values, warnings = processes[0].take(1)
    assert values["routing/layers"] == [1, 3]
    assert values["routing/load/layers"] == [2.0, 2.0]  # expert 0 has 8 of 16
    assert values["routing/confidence"] == pytest.approx(0.5)
    assert values["routing/entropy"] == pytest.approx(1.0)
    assert values["routes/agreement/layers"] == [0.75, 0.625]
    assert values["routes/agreement"] == pytest.approx(np.mean([0.75, 0.625]))
    assert warnings == []


def test_each_take_begins_anew() -> None:
    routing = RoutingSums(SPEC)
    assert routing.take(0) == ({}, [])
    routing.add(passed(routing, [[0, 1]], (1.0, 1.0)))
    assert routing.take(1).values["routing/load"] == 2.0
    assert routing.take(2) == ({}, [])


def test_passes_that_were_not_measured_have_no_routing_metrics() -> None:
    routing = RoutingSums(SPEC)
    routing.add(routing.sums(Stats.live(SPEC.layers, 7)))
    assert routing.take(1) == ({}, [])
