"""What the plugin keeps of requests inside a worker: forced rows while they are needed, and how far each has come."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch

from router_replay.engines.vllm.plugin import worker
from router_replay.engines.vllm.plugin.routes.forcing import FREE, ForcedRouting
from router_replay.engines.vllm.plugin.worker import WorkerState
from router_replay.engines.vllm.requests import extra_arguments
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.makers import random_routes

SPEC = RouterSpec(16, 4, (0, 1, 2))


class Runner:
    """What of vLLM's model runner is read: its table of requests, and the batch of a step."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.scheduler_config = types.SimpleNamespace(max_num_batched_tokens=64)
        self.compilation_config = types.SimpleNamespace(cudagraph_capture_sizes=None)
        self.requests: dict[str, Any] = {}
        self.input_batch: Any = None

    def step(self, work: dict[str, tuple[int, int]], new: dict[str, Routes | None]) -> tuple[Any, np.ndarray]:
        """`work`: for each request of the step, how far it is and how many tokens it computes."""
        self.requests |= dict.fromkeys(new)
        self.input_batch = types.SimpleNamespace(
            req_ids=list(work), num_computed_tokens_cpu=np.array([first for first, _ in work.values()])
        )
        started = [
            types.SimpleNamespace(
                req_id=name,
                sampling_params=types.SimpleNamespace(
                    extra_args=None if rows is None else extra_arguments(rows, as_text=False)
                ),
            )
            for name, rows in new.items()
        ]
        return types.SimpleNamespace(scheduled_new_reqs=started), np.array([count for _, count in work.values()])


def test_rows_lie_where_their_tokens_do_and_are_free_elsewhere() -> None:
    runner = Runner()
    forcing = ForcedRouting(runner, SPEC)
    rows = random_routes(6, SPEC)
    forcing.fill(*runner.step({"free": (0, 3), "forced": (0, 4)}, {"free": None, "forced": rows}))
    assert (forcing.buffer_TLK[:3] == FREE).all()
    assert np.array_equal(forcing.buffer_TLK[3:7].numpy(), rows.ids[:4])
    forcing.fill(*runner.step({"forced": (4, 5)}, {}))
    assert np.array_equal(forcing.buffer_TLK[:2].numpy(), rows.ids[4:])
    assert (forcing.buffer_TLK[2:] == FREE).all()
    forcing.fill(*runner.step({"forced": (9, 1), "free": (3, 1)}, {}))
    assert (forcing.buffer_TLK == FREE).all()
    assert forcing.forced_rows == 6


def test_a_preempted_request_has_its_rows_again() -> None:
    runner = Runner()
    forcing = ForcedRouting(runner, SPEC)
    rows = random_routes(4, SPEC)
    forcing.fill(*runner.step({"a": (0, 4)}, {"a": rows}))
    forcing.fill(*runner.step({"b": (0, 2)}, {"b": None}))  # a is out of the batch, and still in the table
    forcing.fill(*runner.step({"a": (0, 6)}, {}))
    assert np.array_equal(forcing.buffer_TLK[:4].numpy(), rows.ids)


def test_rows_of_finished_requests_are_not_kept() -> None:
    """When nothing else runs, the step that says who finished never comes to where inputs are prepared."""
    runner = Runner()
    forcing = ForcedRouting(runner, SPEC)
    for number in range(5):
        forcing.fill(*runner.step({f"r{number}": (0, 4)}, {f"r{number}": random_routes(4, SPEC)}))
        runner.requests.clear()
    forcing.fill(*runner.step({"r4": (0, 4)}, {"r4": None}))  # the name again, without rows
    assert forcing._rows == {}
    assert (forcing.buffer_TLK == FREE).all()


def state_of(runner: Runner) -> WorkerState:
    state = WorkerState.__new__(WorkerState)  # without a model
    state._runner, state._computed = runner, {}
    return state


def test_what_is_computed_again_was_computed_before() -> None:
    """A swap of weights while a preempted request computes its prefix again: its tokens are the old weights'."""
    runner = Runner()
    state = state_of(runner)
    for first, count in ((0, 64), (64, 37), (0, 64)):
        _, scheduled = runner.step({"a": (first, count)}, {})
        state._note_progress(scheduled)
    assert state.progress() == {"a": 101}


def test_the_newest_of_the_finished_are_remembered(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker, "KEPT", 3)
    runner = Runner()
    state = state_of(runner)
    for number in range(20):
        _, scheduled = runner.step({f"r{number}": (0, 4)}, {f"r{number}": None})
        state._note_progress(scheduled)
        runner.requests.clear()
    assert {"r17", "r18", "r19"} <= set(state.progress())
    assert len(state.progress()) <= 8
