"""What is in force: the innermost plan, every recording, and what a recompute must use again. Without a model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay.state import Column, Plan, Recording, State, in_backward
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 3))


def plan(**more: Any) -> Plan:
    ids = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    return Plan(ids, None, rows_replayed=3, rows_live=0, **more)


def test_a_plan_gives_the_wide_ids_of_one_layer() -> None:
    column = plan().column(Column(1))
    assert column.dtype == torch.int64
    assert column.tolist() == [[2, 3], [6, 7], [10, 11]]
    assert len(plan()) == 3


def test_a_plan_begins_at_the_first_token_with_nothing_counted() -> None:
    made = plan()
    assert (made.start, made.from_host, made.passes) == (0, False, 0)
    assert made.agree_L is None
    assert made.compiled_passes is None


def test_a_plan_moves_with_all_it_has() -> None:
    bare, full = plan(), plan(agree_L=torch.zeros(2), live_LTK=torch.zeros(2, 3, 2), compiled_passes=torch.zeros(1))
    full.live_T1, full.captured_T = torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    for made in (bare, full):
        made.move(torch.device("meta"))
        assert made.ids_TLK.device.type == "meta"
    assert (bare.live_T1, bare.captured_T, bare.agree_L, bare.compiled_passes) == (None,) * 4
    moved = full.live_T1, full.captured_T, full.agree_L, full.live_LTK, full.compiled_passes
    assert {tensor.device.type for tensor in moved} == {"meta"}


def test_agreement_counts_equal_sets_after_the_pass_and_no_missing_row() -> None:
    """The second row is missing: its ids are no recorded ones, even if they equal the live choice."""
    made = plan(agree_L=torch.zeros(2, dtype=torch.int64), live_LTK=torch.zeros(2, 3, 2, dtype=torch.uint8))
    made.captured_T = torch.tensor([True, False, True])
    for number, live in enumerate((made.column(Column(0)).flip(1), made.column(Column(1)) + 1)):
        made.compare(Column(number), live)
    assert made.agree_L is not None
    assert made.agree_L.tolist() == [0, 0]  # nothing is counted inside the layers
    made.count_agreement()
    assert made.agree_L.tolist() == [2, 0]
    made.count_agreement(Column(0))  # a router that is called alone
    assert made.agree_L.tolist() == [4, 0]


@pytest.mark.parametrize("order", [range(5), (3, 0, 1, 4, 2), (0, 1, 0, 1, 2, 3, 4)], ids=["in order", "not", "again"])
@pytest.mark.parametrize(("at_once", "held"), [(1, 1), (20, 1 << 22), (1 << 26, 13)])
def test_agreement_is_the_same_however_many_layers_are_compared_at_once(
    at_once: int, held: int, order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of two bytes, of which torch reads the larger as negative numbers. Layers come again if a pass failed."""
    monkeypatch.setattr("router_replay.replay.state.COMPARED_AT_ONCE", at_once)
    monkeypatch.setattr("router_replay.replay.state.HELD_AT_ONCE", held)
    spec = RouterSpec(65536, 2, (0, 1, 2, 3, 4))
    ids = np.random.default_rng(0).choice(65536, (3, 5, 2), replace=False).astype(np.uint16)
    rows = Routes(ids, spec)
    made = Plan.of(rows, TensorRoutes.from_routes(rows), (3, 0), agreement=True, start=0)
    for number in order:
        live = made.column(Column(number)).flip(1)
        live[:number, 0] += 1  # other experts in the first rows
        made.compare(Column(number), live)
        assert len(made.held) * live.numel() < held
    made.count_agreement()
    assert not made.held
    assert made.agree_L is not None
    assert made.agree_L.tolist() == [3, 2, 1, 0, 0]


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.uint16)])
def test_a_recording_keeps_narrow_ids_per_layer(experts: int, dtype: torch.dtype) -> None:
    recording = Recording(RouterSpec(experts, 2, (1, 3)))
    for piece in range(3):
        recording.add(1, torch.tensor([[piece, 7]]))
    recording.add(0, torch.tensor([[5, 6]]))
    assert recording.pieces[1][0].dtype == dtype
    recording.drop_after([1, 2])
    assert [[piece.tolist() for piece in column] for column in recording.pieces] == [[[[5, 6]]], [[[0, 7]], [[1, 7]]]]


def test_the_innermost_plan_and_all_recordings_are_in_force() -> None:
    state, outer, inner = State(), plan(), plan()
    first, second = Recording(SPEC), Recording(SPEC)
    assert (state.plan, state.recordings, state.was_used) == (None, (), False)
    with state.block(outer), state.block(first):
        assert state.plan is outer
        with state.block(inner), state.block(second):
            assert state.plan is inner
            assert state.recordings == (first, second)
        assert state.plan is outer
        assert state.recordings == (first,)
    assert (state.plan, state.recordings, state.blocks) == (None, (), [])
    assert state.was_used


def test_a_block_that_closes_before_one_inside_it_raises_and_is_gone() -> None:
    state, inner = State(), plan()
    outer, nested = state.block(plan()), state.block(inner)
    outer.__enter__()
    nested.__enter__()
    with pytest.raises(ReplayError, match="reverse order"):
        outer.__exit__(None, None, None)
    assert state.plan is inner
    nested.__exit__(None, None, None)
    assert state.plan is None


def test_another_thread_neither_opened_a_block_nor_may_open_one() -> None:
    state, seen = State(), []

    def elsewhere() -> None:
        seen.append(state.opened_here())
        with pytest.raises(ReplayError, match="cannot open a block here: another thread"), state.block(plan()):
            pass
        seen.append(len(state.blocks))

    assert state.opened_here()
    with state.block(plan()):
        assert state.opened_here()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [False, 1]


def test_a_router_call_gets_the_plan_and_a_recompute_the_plan_of_its_forward() -> None:
    state, used, other = State(), plan(), plan()
    assert state.decide() == (None, True)
    with state.block(used):
        assert state.decide() == (used, True)
        assert not state.is_recompute()
        with state.recompute(other):
            assert state.decide() == (other, False)
            assert state.is_recompute()
        assert state.decide() == (used, True)
    with pytest.raises(KeyError), state.recompute(other):
        raise KeyError
    assert (state.plan, state.recomputing) == (None, False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_recomputed_with_what_its_forward_used(reentrant: bool) -> None:
    state, used, decided = State(), plan(), []

    def layer(values: Tensor) -> Tensor:
        decided.append((*state.decide(), state.is_recompute(), in_backward()))
        return values * values

    values = torch.ones(2, requires_grad=True)
    with state.block(used):
        loss = checkpoint(layer, values, use_reentrant=reentrant).sum()
        with pytest.raises(ReplayError, match=r"detach\(\) was called inside"):
            state.detach()
    live = checkpoint(layer, values, use_reentrant=reentrant).sum()
    with pytest.raises(ReplayError, match=r"detach\(\) was called before the backward pass"):
        state.detach()
    with state.block(plan()):
        loss.backward()
        live.backward()
    first, second, again, again_live = decided
    assert [call[0] for call in decided] == [used, None, used, None]
    assert first[1:] == second[1:] == (True, False, False)
    assert again[1:] == again_live[1:] == (False, True, True)
    del loss, live
    state.detach()
    with pytest.raises(ReplayError, match="was detached"), state.block(plan()):
        pass


class Rerun(torch.autograd.Function):
    """A checkpoint of somebody else's: its backward asks again, and nothing tells of its forward."""

    @staticmethod
    def forward(context: Any, values: Tensor, again: Any) -> Tensor:
        context.again = again
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.again()
        return gradient, None


class RerunByCtx(Rerun):
    """The same in the words of torch's own checkpoints."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.again()
        return gradient, None


@pytest.mark.parametrize("function", [Rerun, RerunByCtx])
def test_a_router_in_backward_that_no_forward_is_known_of_raises_once_a_block_was_open(function: Any) -> None:
    state = State()
    values = torch.ones(1, requires_grad=True)
    function.apply(values, state.decide).sum().backward()  # a model that nothing was replayed in
    with state.block(plan()):
        pass
    with pytest.raises(ReplayError, match="it is not known which routes its forward pass used"):
        function.apply(values, state.decide).sum().backward()
    assert not in_backward()


def test_a_compiled_router_call_goes_by_what_its_pass_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    state, used = State(), plan()
    assert state.decide() == (None, True)
    with state.block(used):
        with pytest.raises(ReplayError, match="it is not known which routes its forward pass used"):
            state.decide()
        state.passing = True
        assert state.decide() == (used, True)
        assert not state.is_recompute()
        state.passing = False
        with state.recompute(used):
            assert state.decide() == (used, False)
            assert state.is_recompute()
