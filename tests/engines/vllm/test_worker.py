"""What the plugin keeps of requests inside a worker: forced rows while they are needed, and how far each has come."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from router_replay.engines.vllm.plugin import worker
from router_replay.engines.vllm.plugin.routes.forcing import FREE, ForcedRouting
from router_replay.engines.vllm.plugin.routes.rules import Rule
from router_replay.engines.vllm.plugin.runner import Step
from router_replay.engines.vllm.plugin.worker import WorkerState
from router_replay.engines.vllm.requests import extra_arguments
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.makers import random_routes

SPEC = RouterSpec(16, 4, (0, 1, 2))


class Steps:
    """The table of requests of a model runner, and the steps that it takes."""

    def __init__(self) -> None:
        self.live: set[str] = set()

    def step(self, work: dict[str, tuple[int, int]], new: dict[str, Routes | None]) -> Step:
        """`work`: for each request of the step, how far it is and how many tokens it computes."""
        self.live |= new.keys()
        started = [
            types.SimpleNamespace(
                req_id=name,
                sampling_params=types.SimpleNamespace(
                    extra_args=None if rows is None else extra_arguments(rows, as_text=False)
                ),
            )
            for name, rows in new.items()
        ]
        computed, scheduled = np.array(list(work.values())).T
        return Step(list(work), scheduled, computed, set(self.live), started)


def forced_routing() -> ForcedRouting:
    runner = types.SimpleNamespace(
        device=torch.device("cpu"),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=types.SimpleNamespace(cudagraph_capture_sizes=None),
    )
    return ForcedRouting(runner, SPEC)


def test_rows_lie_where_their_tokens_do_and_are_free_elsewhere() -> None:
    steps, forcing = Steps(), forced_routing()
    rows = random_routes(6, SPEC).sorted()
    forcing.fill(steps.step({"free": (0, 3), "forced": (0, 4)}, {"free": None, "forced": rows}))
    assert (forcing.buffer_TLK[:3] == FREE).all()
    assert np.array_equal(forcing.buffer_TLK[3:7].numpy(), rows.ids[:4])
    forcing.fill(steps.step({"forced": (4, 5)}, {}))
    assert np.array_equal(forcing.buffer_TLK[:2].numpy(), rows.ids[4:])
    assert (forcing.buffer_TLK[2:] == FREE).all()
    forcing.fill(steps.step({"forced": (9, 1), "free": (3, 1)}, {}))
    assert (forcing.buffer_TLK == FREE).all()
    assert forcing.forced_rows == 6


def test_rows_that_are_written_later_do_not_change_a_copy_that_is_still_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model Runner V2 prepares a step while the device may not have copied the rows of the last one."""
    steps, forcing = Steps(), forced_routing()
    rows = random_routes(8, SPEC).sorted()
    sources: list[torch.Tensor] = []

    def later(_: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        sources.append(source)

    monkeypatch.setattr(torch.Tensor, "copy_", later)
    forcing.fill(steps.step({"a": (0, 4)}, {"a": rows}))
    forcing.fill(steps.step({"a": (4, 4)}, {}))
    assert np.array_equal(sources[0].numpy(), rows.ids[:4])
    assert np.array_equal(sources[1].numpy(), rows.ids[4:])


def test_a_preempted_request_has_its_rows_again() -> None:
    steps, forcing = Steps(), forced_routing()
    rows = random_routes(4, SPEC).sorted()
    forcing.fill(steps.step({"a": (0, 4)}, {"a": rows}))
    forcing.fill(steps.step({"b": (0, 2)}, {"b": None}))  # a is out of the batch, and still in the table
    forcing.fill(steps.step({"a": (0, 6)}, {}))
    assert np.array_equal(forcing.buffer_TLK[:4].numpy(), rows.ids)
    steps.live.discard("a")  # as Model Runner V2 does: out of the table, and among the new requests when it continues
    forcing.fill(steps.step({"c": (0, 2)}, {"c": None}))
    forcing.fill(steps.step({"c": (2, 1), "a": (0, 6)}, {"a": rows}))
    assert np.array_equal(forcing.buffer_TLK[1:5].numpy(), rows.ids)


def test_routers_take_forced_rows_unless_a_pass_forces_none() -> None:
    steps, forcing = Steps(), forced_routing()
    rows = random_routes(4, SPEC).sorted()
    logits = torch.randn(4, SPEC.num_experts)

    def route(hidden: Any, logits: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(SPEC.top_k)
        return weights, ids.int()

    router = forcing._forcing(route, 1, Rule("softmax", False, 1.0, True))
    free = route(None, logits, None)
    assert all(map(torch.equal, router(None, logits, None), free))
    forcing.fill(steps.step({"a": (0, 4)}, {"a": rows}))
    assert sorted(router(None, logits, None)[1][0].tolist()) == sorted(rows.ids[0, 1].tolist())
    forcing.fill(steps.step({"a": (4, 4)}, {}))
    assert all(map(torch.equal, router(None, logits, None), free))


def test_no_pass_is_idle_before_vllm_has_warmed_up() -> None:
    """Otherwise the code that forces would be compiled while a CUDA graph is captured, which fails."""
    forcing = forced_routing()
    assert forcing._idle()  # a CPU has no graphs
    forcing.warm = False
    assert not forcing._idle()
    state = types.SimpleNamespace(router_replay=types.SimpleNamespace(forcing=forcing))
    assert worker._warming_up(lambda self: "seconds")(state) == "seconds"
    assert forcing._idle()


def test_rows_of_finished_requests_are_not_kept() -> None:
    """When nothing else runs, the step that says who finished never comes to where inputs are prepared."""
    steps, forcing = Steps(), forced_routing()
    for number in range(5):
        forcing.fill(steps.step({f"r{number}": (0, 4)}, {f"r{number}": random_routes(4, SPEC)}))
        steps.live.clear()
    forcing.fill(steps.step({"r4": (0, 4)}, {"r4": None}))  # the name again, without rows
    assert forcing._rows == {}
    assert (forcing.buffer_TLK == FREE).all()


def worker_state() -> WorkerState:
    state = WorkerState.__new__(WorkerState)  # without a model
    state._computed = {}
    return state


def test_what_is_computed_again_was_computed_before() -> None:
    """A swap of weights while a preempted request computes its prefix again: its tokens are the old weights'."""
    steps, state = Steps(), worker_state()
    for first, count in ((0, 64), (64, 37), (0, 64)):
        state._note_progress(steps.step({"a": (first, count)}, {}))
    assert state.progress() == {"a": 101}


def test_a_long_request_is_not_forgotten_while_it_is_out_of_the_table(monkeypatch: Any) -> None:
    """Model Runner V2 takes a preempted request out of its table; many newer ones may have finished meanwhile."""
    monkeypatch.setattr(worker, "KEPT", 3)
    steps, state = Steps(), worker_state()
    for number in range(20):
        name = f"r{number}"
        state._note_progress(steps.step({"long": (number, 1), name: (0, 4)}, {"long": None, name: None}))
        steps.live.discard(name)
    steps.live.clear()
    state._note_progress(steps.step({"other": (0, 4)}, {"other": None}))
    assert state.progress()["long"] == 20


def test_the_newest_of_the_finished_are_remembered(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker, "KEPT", 3)
    steps, state = Steps(), worker_state()
    for number in range(20):
        state._note_progress(steps.step({f"r{number}": (0, 4)}, {f"r{number}": None}))
        steps.live.clear()
    assert {"r17", "r18", "r19"} <= set(state.progress())
    assert len(state.progress()) <= 8
