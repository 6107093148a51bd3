"""RouterReplay in one family: what is in force when, what raises, and that nothing is left behind."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from router_replay import RouterSpec, Routes, Sample, pack
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny
from tests.replay.conftest import routes_for

# -- what is in force ------------------------------------------------------------------------------


def test_nesting_and_exceptions_leave_the_model_live(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()
    outer, inner = routes_for(replayer, model, 1), routes_for(replayer, model, 2)
    with replayer.replay(inner):
        expected_inner = model.forward()
    with replayer.replay(outer):
        expected_outer = model.forward()
        with replayer.replay(inner):
            assert torch.equal(model.forward(), expected_inner)
        with pytest.raises(ZeroDivisionError), replayer.replay(inner):
            raise ZeroDivisionError
        assert torch.equal(model.forward(), expected_outer)
    assert torch.equal(model.forward(), live)
    assert len({out.sum().item() for out in (live, expected_inner, expected_outer)}) == 3


def test_an_exception_inside_the_forward_leaves_the_model_live(model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()
    handle = model.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), replayer.replay(routes_for(replayer, model)):
        model.forward()
    handle.remove()
    assert torch.equal(model.forward(), live)


def test_record_notes_what_was_used_and_appends_passes(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with replayer.record() as first:
        model.forward()
    forced = routes_for(replayer, model)
    with replayer.record() as both, replayer.replay(forced):
        model.forward()
        model.forward()
    assert both.routes == Routes.concat([forced, forced])
    assert first.routes != forced
    with pytest.raises(ReplayError, match="expected at least one complete forward pass"), replayer.record() as nothing:
        _ = nothing.routes


def test_replay_of_a_recording_stays_on_the_device(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with replayer.record() as recording:
        live = model.forward()
    assert recording.tensors.ids.dtype == torch.uint8
    with replayer.replay(recording):
        assert torch.equal(model.forward(), live)


def test_many_experts_take_two_bytes() -> None:
    model = tiny.make("qwen3_moe", num_experts=300, moe_intermediate_size=8)
    replayer = RouterReplay(model.model)
    with replayer.record() as recording:
        live = model.forward()
    assert recording.tensors.ids.dtype == torch.uint16
    assert recording.routes.ids.max() > 255
    for routes in (recording.routes, recording):
        with replayer.replay(routes):
            assert torch.equal(model.forward(), live)


def test_agreement_counts_sets(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with replayer.record() as recording:
        model.forward()
    ids = recording.routes.ids[..., ::-1].copy()  # another slot order is the same set
    ids[:3, 0] = (recording.routes.ids[:3, 0] + 1) % 8
    different = sum(set(ids[row, 0]) != set(recording.routes.ids[row, 0]) for row in range(3))
    assert different
    with replayer.replay(Routes(ids, replayer.spec), agreement=True):
        model.forward()
    assert replayer.stats.agreement is not None
    assert replayer.stats.agreement[0] == pytest.approx(1 - different / model.tokens)


def test_a_second_thread_is_refused(model: tiny.Tiny, replayer: RouterReplay) -> None:
    caught: list[Exception] = []

    def elsewhere(action: Any) -> None:
        try:
            action()
        except ReplayError as error:
            caught.append(error)

    def block() -> None:
        with replayer.record():
            pass

    with replayer.replay(routes_for(replayer, model)):
        for action in (model.forward, block):
            thread = threading.Thread(target=elsewhere, args=(action,))
            thread.start()
            thread.join()
    assert len(caught) == 2
    assert all("thread" in str(error) for error in caught)
    model.forward()


# -- models beside each other ----------------------------------------------------------------------


def test_a_deepcopy_is_its_own_model(model: tiny.Tiny, replayer: RouterReplay) -> None:
    routes = routes_for(replayer, model)
    live = model.forward()
    with replayer.replay(routes):
        forced = model.forward()
        twin = tiny.Tiny("twin", copy.deepcopy(model.model), model.inputs, model.tokens)
        assert torch.equal(twin.forward(), live)
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter.mul_(1.5)
    twin_live = twin.forward()
    assert not torch.equal(twin_live, live)  # it uses its own weights
    other = RouterReplay(twin.model)
    with other.replay(routes):
        assert not torch.equal(twin.forward(), twin_live)
        assert torch.equal(model.forward(), live)
    with replayer.replay(routes):
        assert torch.equal(model.forward(), forced)
        assert torch.equal(twin.forward(), twin_live)
    assert replayer.stats.passes == 2
    assert other.stats.passes == 1


def test_a_reference_model_beside_the_policy_stays_live(model: tiny.Tiny, replayer: RouterReplay) -> None:
    reference = tiny.make("qwen3_moe")  # the same class, built again: nothing is registered by class
    expected = reference.forward()
    with replayer.replay(routes_for(replayer, model, 1)):
        assert not torch.equal(model.forward(), expected)
        assert torch.equal(reference.forward(), expected)
    RouterReplay(reference.model)
    with replayer.replay(routes_for(replayer, model, 1)):
        assert torch.equal(reference.forward(), expected)
    assert replayer.stats.passes == 1


def test_one_replayer_per_model_until_it_is_detached(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with pytest.raises(ReplayError, match="already belongs"):
        RouterReplay(model.model)
    before = tiny.make("qwen3_moe").model
    replayer.detach()
    for (name, module), (_, plain) in zip(model.model.named_modules(), before.named_modules(), strict=True):
        assert module.__dict__.keys() == plain.__dict__.keys(), name
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    RouterReplay(model.model)


def test_a_forward_that_somebody_set_before_is_kept(model: tiny.Tiny) -> None:
    router = model.model.model.layers[0].mlp.gate
    calls = []

    def patched(hidden_states: Tensor) -> Any:
        calls.append(1)
        return type(router).forward(router, hidden_states)

    router.forward = patched
    replayer = RouterReplay(model.model)
    with replayer.replay(routes_for(replayer, model)):
        model.forward()
    assert calls
    replayer.detach()
    assert router.forward is patched


class Pair(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_only_the_text_decoder_is_touched() -> None:
    text, other = tiny.make("qwen3_moe").model, tiny.make("qwen3_vl_moe").model
    for name in ("talker", "vision_tower", "draft_model", "encoder"):
        replayer = RouterReplay(Pair(thinker=text, **{name: other}))
        assert "3 left live" in repr(replayer)
        assert all("forward" not in module.__dict__ for module in other.modules())
        assert replayer.spec == RouterSpec(8, 3, (0, 1, 2))
        replayer.detach()
    with pytest.raises(ReplayError, match="not clear which one"):
        RouterReplay(Pair(one=text, two=other))
    with pytest.raises(ReplayError, match="no router"):
        RouterReplay(nn.Linear(2, 2))


# -- bad input -------------------------------------------------------------------------------------


def test_bad_routes_raise_before_the_forward(model: tiny.Tiny, replayer: RouterReplay) -> None:
    spec, rows = replayer.spec, model.tokens
    ran = []
    model.model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    with (
        pytest.raises(ReplayError, match=f"{rows - 1} rows.*{rows} tokens"),
        replayer.replay(random_routes(rows - 1, spec)),
    ):
        model.forward()
    other = RouterSpec(8, 2, (0, 1, 2))
    with pytest.raises(ReplayError, match=r"expected .*top_k=3.*got .*=2"), replayer.replay(random_routes(rows, other)):
        model.forward()
    with pytest.raises(ReplayError, match="NoneType"), replayer.replay(None):
        model.forward()
    missing = Routes.missing(rows, spec)
    for given in (missing, TensorRoutes.from_routes(missing)):
        with pytest.raises(ReplayError, match="none of the 12 rows"), replayer.replay(given, on_missing="live"):
            model.forward()
    meta = TensorRoutes(
        torch.zeros(rows, 3, 3, dtype=torch.uint8, device="meta"),
        torch.ones(rows, dtype=torch.bool, device="meta"),
        spec,
        True,
    )
    with pytest.raises(ReplayError, match=r"meta.*cpu"), replayer.replay(meta):
        model.forward()
    assert not ran
    with pytest.raises(ReplayError, match=r"num_experts=8.*num_experts=9"):
        RouterReplay(tiny.make("qwen3_moe").model, RouterSpec(9, 3, (0, 1, 2)))
    with pytest.raises(ReplayError, match="on_missing"), replayer.replay(random_routes(rows, spec), on_missing="skip"):  # type: ignore[arg-type]
        pass


def test_a_missing_row_that_bears_loss_raises(model: tiny.Tiny, replayer: RouterReplay) -> None:
    captured = np.arange(model.tokens) != 5
    routes = Routes(random_routes(model.tokens, replayer.spec).ids, replayer.spec, captured)
    loss_mask = np.arange(model.tokens) >= 5
    for given in (routes, TensorRoutes.from_routes(routes)):
        with pytest.raises(ReplayError, match="first is row 5"), replayer.replay(given, loss_mask=loss_mask):
            model.forward()
        with replayer.replay(given, loss_mask=loss_mask, on_missing="live"):
            model.forward()
        with replayer.replay(given, loss_mask=np.arange(model.tokens) > 5):
            model.forward()
    assert replayer.stats.passes == 4
    assert replayer.stats.rows_live == (4, 4, 4)
    assert replayer.stats.rows_replayed == (44, 44, 44)


def test_a_batch_brings_its_own_loss_mask(model: tiny.Tiny, replayer: RouterReplay) -> None:
    tokens = model.inputs["input_ids"].reshape(-1).numpy()
    captured = np.arange(len(tokens)) != 3  # predicts token 4
    routes = Routes(routes_for(replayer, model).ids, replayer.spec, captured=captured)
    batch = pack([Sample(tokens, np.zeros(len(tokens)), np.ones(len(tokens), bool), routes)], 64, on_missing="live")
    with pytest.raises(ReplayError, match="the first is row 3"), replayer.replay(batch):
        pass
    with replayer.replay(batch, on_missing="live"):
        model.forward()
    assert set(replayer.stats.rows_live) == {1}


def test_a_router_that_does_not_choose_is_named(model: tiny.Tiny, replayer: RouterReplay) -> None:
    def fused(hidden_states: Tensor) -> Any:
        """A kernel that knows the top-k by heart."""
        logits = torch.nn.functional.linear(hidden_states, router.weight)
        ids = logits.argsort(-1, descending=True)[:, :3]
        return logits, logits.softmax(-1).gather(-1, ids), ids

    router = model.model.model.layers[1].mlp.gate
    router.forward = fused
    for block in (replayer.replay(routes_for(replayer, model)), replayer.record()):
        with pytest.raises(ReplayError, match=r"layers \[1\]"), block:
            model.forward()
    model.forward()


def test_a_pass_with_image_tokens_is_refused() -> None:
    """ernie4_5_vl_moe gives image tokens to other experts: rows of the text router would fit no token."""
    model = tiny.make("ernie4_5_vl_moe")
    replayer = RouterReplay(model.model)
    kinds = torch.zeros(tiny.BATCH, tiny.LENGTH, dtype=torch.int64)
    kinds[0, 2:4] = 1
    model.inputs["moe_mm_token_type_ids"] = kinds
    model.forward()
    with (
        pytest.raises(ReplayError, match="the router got 10 tokens"),
        replayer.replay(random_routes(model.tokens, replayer.spec)),
    ):
        model.forward()
    with pytest.raises(ReplayError, match="all 12 tokens of this pass, got 10"), replayer.record():
        model.forward()
