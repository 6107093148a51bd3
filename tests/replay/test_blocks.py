"""Blocks and what may go wrong around them: order, threads, tasks, caches, failures, detaching, copies on disk."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn
from transformers import DynamicCache

from router_replay import Routes
from router_replay.errors import ReplayError
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny
from tests.replay.conftest import routes_for

# -- blocks that do not nest -----------------------------------------------------------------------


def test_two_generators_do_not_share_a_model(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()

    def passes(seed: int) -> Iterator[torch.Tensor]:
        with replayer.replay(routes_for(replayer, model, seed)):
            yield model.forward()
            yield model.forward()

    first, second = passes(1), passes(2)
    expected = next(first)
    with pytest.raises(ReplayError, match="another generator or asyncio task"):
        next(second)
    assert torch.equal(next(first), expected)
    first.close()
    assert torch.equal(model.forward(), live)


def test_a_live_pass_of_another_generator_is_refused(model: tiny.Tiny, replayer: RouterReplay) -> None:
    def replayed() -> Iterator[None]:
        with replayer.replay(routes_for(replayer, model)):
            yield

    def live() -> Iterator[torch.Tensor]:
        yield model.forward()

    opener = replayed()
    next(opener)
    with pytest.raises(ReplayError, match="another generator"):
        next(live())
    opener.close()
    next(live())


def test_two_asyncio_tasks_do_not_share_a_model(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()

    async def step(seed: int) -> torch.Tensor:
        with replayer.replay(routes_for(replayer, model, seed)):
            await asyncio.sleep(0)
            return model.forward()

    async def both() -> list[Any]:
        return await asyncio.gather(step(1), step(2), return_exceptions=True)

    first, second = asyncio.run(both())
    with replayer.replay(routes_for(replayer, model, 1)):
        assert torch.equal(first, model.forward())
    assert isinstance(second, ReplayError)
    assert torch.equal(model.forward(), live)


def test_blocks_that_close_in_the_wrong_order_raise_and_leave_nothing(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()
    outer, inner = replayer.replay(routes_for(replayer, model, 1)), replayer.replay(routes_for(replayer, model, 2))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ReplayError, match="reverse order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert torch.equal(model.forward(), live)


def test_a_block_may_be_opened_by_a_context_manager_or_for_the_consumer_of_a_generator(
    model: tiny.Tiny, replayer: RouterReplay
) -> None:
    """Both suspend a generator while the block is open, and both mean it."""

    @contextlib.contextmanager
    def replaying(seed: int) -> Iterator[None]:
        with replayer.replay(routes_for(replayer, model, seed)):
            yield

    def batches() -> Iterator[int]:
        for seed in (1, 2):
            with replaying(seed):
                yield seed

    def in_a_generator() -> Iterator[Any]:
        with replaying(1), replayer.record() as recorded:
            model.forward()
            yield recorded.routes

    for seed in batches():
        with replayer.record() as recorded:
            model.forward()
        assert recorded.routes == routes_for(replayer, model, seed)
    assert next(in_a_generator()) == routes_for(replayer, model, 1)


# -- threads and compiled passes -------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_pass_in_another_thread_is_refused(
    model: tiny.Tiny, replayer: RouterReplay, fullgraph: bool
) -> None:
    torch._dynamo.reset()
    model.model.set_experts_implementation("batched_mm")
    model.model = torch.compile(model.model, backend="eager", fullgraph=fullgraph)
    outcome: list[Any] = []

    def elsewhere() -> None:
        try:
            outcome.append(model.forward())
        except Exception as error:
            outcome.append(error)

    with replayer.replay(routes_for(replayer, model)):
        expected = model.forward()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert torch.equal(model.forward(), expected)
    kind = torch._dynamo.exc.Unsupported if fullgraph else ReplayError
    assert isinstance(outcome[0], kind), outcome
    thread = threading.Thread(target=elsewhere)  # without a block, any thread may run live passes
    thread.start()
    thread.join()
    assert isinstance(outcome[1], torch.Tensor), outcome
    torch._dynamo.reset()


# -- caches ----------------------------------------------------------------------------------------


def test_a_pass_behind_a_filled_cache_takes_its_own_rows_or_raises(model: tiny.Tiny, replayer: RouterReplay) -> None:
    tokens = model.inputs["input_ids"][:1]
    routes = random_routes(6, replayer.spec)
    with replayer.replay(routes), torch.no_grad():
        whole = model.model(input_ids=tokens, use_cache=False).logits
    cache = DynamicCache(config=model.model.config)
    with torch.no_grad():
        with replayer.replay(routes[:3]):
            model.model(input_ids=tokens[:, :3], past_key_values=cache)
            with pytest.raises(ReplayError, match="already holds 3 tokens"):
                model.model(input_ids=tokens[:, 3:], past_key_values=cache)
        with replayer.replay(routes[3:], start=3):
            second = model.model(input_ids=tokens[:, 3:], past_key_values=cache).logits
    torch.testing.assert_close(second, whole[:, 3:], rtol=1e-4, atol=1e-4)


def test_generate_from_a_prompt_of_one_token_does_not_use_its_row_again(
    model: tiny.Tiny, replayer: RouterReplay
) -> None:
    with (
        replayer.replay(random_routes(1, replayer.spec)),
        pytest.raises(ReplayError, match="already holds 1 tokens"),
    ):
        model.model.generate(model.inputs["input_ids"][:1, :1], max_new_tokens=3, do_sample=False)


# -- recording -------------------------------------------------------------------------------------


def test_a_failed_pass_leaves_no_rows_in_a_recording(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with replayer.record() as whole:
        model.forward()
    handle = model.model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with replayer.record() as recorded:
        with pytest.raises(ZeroDivisionError):
            model.forward()
        handle.remove()
        model.forward()
    assert recorded.routes == whole.routes


def test_nested_recordings_both_get_the_rows(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with replayer.record() as outer:
        model.forward()
        with replayer.record() as inner:
            model.forward()
        model.forward()
    assert len(inner.routes) == model.tokens
    assert outer.routes == Routes.concat([inner.routes] * 3)


# -- routers that serve two layers -----------------------------------------------------------------


def test_tied_routers_are_refused(model: tiny.Tiny) -> None:
    layers = model.model.model.layers
    layers[1].mlp.gate = layers[0].mlp.gate
    with pytest.raises(ReplayError, match=r"layers \[0, 1\] share one router"):
        RouterReplay(model.model)


def test_a_layer_that_runs_twice_in_a_pass_is_refused(model: tiny.Tiny, replayer: RouterReplay) -> None:
    layer = model.model.model.layers[1]
    plain = layer.forward
    layer.forward = lambda hidden, *a, **k: plain(plain(hidden, *a, **k), *a, **k)
    with pytest.raises(ReplayError, match="layer 1 was called twice"), replayer.record():
        model.forward()


def test_one_model_under_two_names_is_one_model(model: tiny.Tiny) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = model.model
            self.alias = model.model

    assert RouterReplay(Twice()).spec.layers == (0, 1, 2)


# -- detaching -------------------------------------------------------------------------------------


def test_a_detached_replayer_refuses_blocks(model: tiny.Tiny, replayer: RouterReplay) -> None:
    routes = routes_for(replayer, model)
    with replayer.record(), pytest.raises(ReplayError, match="close the block first"):
        replayer.detach()
    replayer.detach()
    for block in (replayer.replay(routes), replayer.record()):
        with pytest.raises(ReplayError, match="was detached"), block:
            model.forward()
    with pytest.raises(ReplayError, match="was detached"):
        replayer.detach()


def test_detaching_before_a_checkpointed_backward_is_refused(model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    with replayer.replay(routes_for(replayer, model)):
        loss = model.forward().sum()
    with pytest.raises(ReplayError, match="before the backward pass"):
        replayer.detach()
    loss.backward()
    del loss
    replayer.detach()


def test_detaching_keeps_a_wrapper_that_somebody_put_over_ours(model: tiny.Tiny, replayer: RouterReplay) -> None:
    router = model.model.model.layers[0].mlp.gate
    ours = router.forward
    router.forward = lambda *args: ours(*args)
    with pytest.raises(ReplayError, match=r"layers.0.mlp.gate.forward was replaced"):
        replayer.detach()
    with replayer.record() as recorded:  # it stays whole
        model.forward()
    assert len(recorded.routes) == model.tokens
    router.forward = ours
    replayer.detach()


# -- copies on disk and in other processes ---------------------------------------------------------


def plain_logits(file: bytes) -> torch.Tensor:
    model = torch.load(io.BytesIO(file), weights_only=False)
    with torch.no_grad():
        return model(**tiny.make("qwen3_moe").inputs).logits


def test_a_model_saved_while_attached_loads_as_a_plain_model(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.disable_input_require_grads()  # a hook of transformers that no model can be pickled with
    with replayer.replay(routes_for(replayer, model)):
        file = io.BytesIO()
        torch.save(model.model, file)
    assert b"router_replay" not in file.getvalue()  # it loads where this package is not installed
    assert torch.equal(plain_logits(file.getvalue()), live)
    again = pickle.loads(pickle.dumps(model.model))
    other = RouterReplay(again)
    with other.replay(routes_for(other, model)):
        assert not torch.equal(again(**model.inputs).logits, live)


def _forward_in_a_child(rank: int, model: nn.Module, inputs: dict[str, Any], out: torch.Tensor) -> None:
    with torch.no_grad():
        out.copy_(model(**inputs).logits)


def test_a_model_may_be_sent_to_a_process_while_attached(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()
    out = torch.zeros_like(live).detach().share_memory_()
    torch.multiprocessing.spawn(_forward_in_a_child, args=(model.model, model.inputs, out))
    torch.testing.assert_close(out, live.detach())
