"""Gradient checkpointing under replay: what backward recomputes takes the routes of its own forward, or raises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from router_replay.errors import ReplayError
from router_replay.replay.replayer import RouterReplay
from tests.replay import tiny
from tests.replay.conftest import routes_for


def gradients(model: tiny.Tiny, loss: Tensor) -> list[Tensor]:
    model.model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.model.parameters() if p.grad is not None]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_reentrant_checkpointing_works_inside_and_raises_outside(model: tiny.Tiny, replayer: RouterReplay) -> None:
    routes, other = routes_for(replayer, model, 1), routes_for(replayer, model, 2)
    with replayer.replay(routes):
        expected = gradients(model, model.forward().square().sum())
    model.model.gradient_checkpointing_enable({"use_reentrant": True})
    with replayer.replay(routes):
        assert equal(gradients(model, model.forward().square().sum()), expected)
        loss = model.forward().square().sum()
    with pytest.raises(ReplayError, match="recomputed in backward"):
        loss.backward()
    with replayer.replay(routes):
        loss = model.forward().square().sum()
    with pytest.raises(ReplayError, match="recomputed in backward"), replayer.replay(other):
        loss.backward()
    loss = model.forward().square().sum()  # a live pass stays one
    loss.backward()
    loss = model.forward().square().sum()
    with pytest.raises(ReplayError, match="recomputed in backward"), replayer.replay(other):
        loss.backward()


def test_a_reentrant_checkpoint_of_one_block_does_not_take_the_routes_of_the_next(
    model: tiny.Tiny, replayer: RouterReplay
) -> None:
    model.model.gradient_checkpointing_enable({"use_reentrant": True})
    with replayer.replay(routes_for(replayer, model, 1)):
        first = model.forward().square().sum()
    with replayer.replay(routes_for(replayer, model, 2)):
        model.forward()  # every router has used the second routes by now
        with pytest.raises(ReplayError, match="recomputed in backward"):
            first.backward()


def test_two_open_graphs_recompute_with_their_own_routes(model: tiny.Tiny, replayer: RouterReplay) -> None:
    first, second = routes_for(replayer, model, 1), routes_for(replayer, model, 2)
    expected = []
    for routes in (first, second):
        with replayer.replay(routes):
            expected.append(gradients(model, model.forward().square().sum()))
    live = gradients(model, model.forward().square().sum())
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for routes in (first, second):
        with replayer.replay(routes):
            losses.append(model.forward().square().sum())
    live_loss = model.forward().square().sum()
    assert equal(gradients(model, losses[1]), expected[1])
    with replayer.replay(second):
        assert equal(gradients(model, live_loss), live)
        assert equal(gradients(model, losses[0]), expected[0])


def test_a_checkpoint_of_ones_own_takes_checkpoint_context(model: tiny.Tiny, replayer: RouterReplay) -> None:
    routes = routes_for(replayer, model)
    with replayer.replay(routes):
        expected = gradients(model, model.forward().square().sum())
    for layer in model.model.model.layers:
        plain = layer.forward
        layer.forward = lambda *a, plain=plain, **k: checkpoint(
            plain, *a, use_reentrant=False, context_fn=replayer.checkpoint_context, **k
        )
    with replayer.replay(routes):
        loss = model.forward().square().sum()
    assert equal(gradients(model, loss), expected)


def test_a_recompute_is_neither_recorded_nor_counted(model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    with replayer.replay(routes_for(replayer, model), agreement=True), replayer.record() as recording:
        model.forward().sum().backward()
    assert len(recording.routes) == model.tokens
    assert replayer.stats.passes == 1


def test_a_deepcopy_forgets_checkpoint_contexts(model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    with replayer.replay(routes_for(replayer, model)):
        model.forward()
    twin = tiny.Tiny("twin", copy.deepcopy(model.model), model.inputs, model.tokens)
    assert twin.model.model.layers[0]._gradient_checkpointing_func.func is checkpoint
    twin.forward().sum().backward()
