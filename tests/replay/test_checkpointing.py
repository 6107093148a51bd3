"""Gradient checkpointing under replay: what backward recomputes takes the routes of its own forward, or raises."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from router_replay.errors import ReplayError
from router_replay.replay.checkpoint import _modules
from router_replay.replay.replayer import RouterReplay
from tests.replay import tiny
from tests.replay.conftest import routes_for


def gradients(model: tiny.Tiny, loss: Tensor) -> list[Tensor]:
    model.model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.model.parameters() if p.grad is not None]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Every way in which people checkpoint layers: transformers' own switch, torch's module wrapper (the FSDP recipe), and a
# call of torch's function, each reentrant and not.


def by_transformers(model: tiny.Tiny, reentrant: bool) -> None:
    model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def by_checkpoint_wrapper(model: tiny.Tiny, reentrant: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
    is_layer = lambda module: type(module).__name__ == "Qwen3MoeDecoderLayer"  # noqa: E731
    apply_activation_checkpointing(model.model, checkpoint_wrapper_fn=wrap, check_fn=is_layer)


def by_ones_own_call(model: tiny.Tiny, reentrant: bool) -> None:
    for layer in model.model.model.layers:
        plain = layer.forward

        def forward(hidden: Tensor, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(plain, *args, **kwargs), hidden, use_reentrant=reentrant)

        layer.forward = forward


def by_a_function_of_ones_own(model: tiny.Tiny, reentrant: bool) -> None:
    """As DeepSpeed, Megatron and Unsloth do it."""
    for layer in model.model.model.layers:
        plain = layer.forward

        def forward(hidden: Tensor, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return OnesOwn.apply(functools.partial(plain, *args, **kwargs), hidden)

        layer.forward = forward


class OnesOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, hidden: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(hidden)
        torch.autograd.backward(out, grad)
        assert hidden.grad is not None
        return None, hidden.grad


WAYS = [
    pytest.param(way, reentrant, id=f"{way.__name__}-{'reentrant' if reentrant else 'not_reentrant'}")
    for way in (by_transformers, by_checkpoint_wrapper, by_ones_own_call, by_a_function_of_ones_own)
    for reentrant in (True, False)
    if reentrant or way is not by_a_function_of_ones_own
]


@pytest.mark.parametrize(("way", "reentrant"), WAYS)
@pytest.mark.parametrize("attached_first", [True, False])
def test_a_recompute_takes_the_routes_of_its_own_forward(way: Any, reentrant: bool, attached_first: bool) -> None:
    """Forward under A, under B and live; then backward of each, and of the sum, in and outside of other blocks."""
    torch.set_num_threads(1)
    plain, checkpointed = tiny.make("qwen3_moe"), tiny.make("qwen3_moe")
    expected_by = RouterReplay(plain.model)
    if attached_first:
        replayer = RouterReplay(checkpointed.model)
        way(checkpointed, reentrant)
    else:
        way(checkpointed, reentrant)
        replayer = RouterReplay(checkpointed.model)
    given = [routes_for(replayer, plain, 1), routes_for(replayer, plain, 2), None]

    def losses(by: RouterReplay, model: tiny.Tiny) -> list[Tensor]:
        found = []
        for routes in given:
            with by.replay(routes) if routes is not None else contextlib.nullcontext():
                found.append(model.forward().square().sum())
        return found

    expected = [gradients(plain, loss) for loss in losses(expected_by, plain)]
    together = gradients(plain, sum(losses(expected_by, plain)))  # type: ignore[arg-type]
    open_graphs = losses(replayer, checkpointed)
    for number in (1, 0, 2):
        with replayer.replay(given[1]):
            assert equal(gradients(checkpointed, open_graphs[number]), expected[number]), number
    open_graphs = losses(replayer, checkpointed)
    with replayer.replay(given[1]):
        mine = gradients(checkpointed, sum(open_graphs))  # type: ignore[arg-type]
    for one, other in zip(mine, together, strict=True):  # added up in another order
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_recompute_that_nobody_can_place_raises(model: tiny.Tiny, replayer: RouterReplay) -> None:
    """A Function that keeps its context elsewhere: which forward is recomputed cannot be told, so it must not run."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(function: Any, hidden: Tensor) -> Tensor:
            return function(hidden)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.function, hidden = inputs
            ctx.save_for_backward(hidden)

        backward = OnesOwn.backward

    layer = model.model.model.layers[1]
    plain = layer.forward
    layer.forward = lambda hidden, *a, **k: Hidden.apply(functools.partial(plain, *a, **k), hidden)
    model.forward().sum().backward()  # before any block, everything is live
    with replayer.replay(routes_for(replayer, model)):
        loss = model.forward().sum()
        with pytest.raises(ReplayError, match="not known which routes"):
            loss.backward()


def test_layers_compiled_one_by_one_recompute_with_their_own_routes(model: tiny.Tiny, replayer: RouterReplay) -> None:
    first, second = routes_for(replayer, model, 1), routes_for(replayer, model, 2)
    model.model.set_experts_implementation("batched_mm")
    with replayer.replay(first):
        expected = gradients(model, model.forward().square().sum())
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.init()  # the compiler would do so inside the first checkpoint, which torch refuses
    for layer in model.model.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend="aot_eager")
    losses = []
    for routes in (first, second):
        with replayer.replay(routes):
            losses.append(model.forward().square().sum())
    with replayer.replay(second):
        mine = gradients(model, losses[0])
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


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


def test_checkpoints_are_looked_for_in_every_module() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)])
    model.append(model[1])  # shared
    model.register_module("absent", None)
    found = _modules(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())
