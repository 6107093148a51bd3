"""install() itself: models that were built before, a second call, other patches, other versions of megatron-core."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from megatron.core.transformer.moe import router_replay as megatron_module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.replay.megatron import MegatronReplay, install
from tests.megatron_real import native_api, tiny
from tests.megatron_real.native_api import equal, expected_gradients, native_model, two_routes, with_row

FORWARD = RouterReplayAction.REPLAY_FORWARD


@pytest.fixture(scope="module")
def hf() -> Any:
    tiny.start()
    return tiny.hf_model()


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    with native_api.untouched():
        yield


def test_a_model_that_was_built_before_is_checked_when_it_is_passed_or_in_its_first_pass(hf: Any) -> None:
    (batch,) = tiny.tokens(1)
    chunk = native_model(hf)
    rows = list(native_api.rows_of(two_routes()[0]).values())
    bad = [rows[0], with_row(rows[1], 3, [1, 8]), rows[2]]
    with install([chunk]), pytest.raises(ReplayError, match=r"layer 2, row 3: .*of 8 experts.*range"):
        RouterReplay.set_replay_data(bad)
    with install():
        with pytest.raises(ReplayError, match=r"router 1, row 3: .*got \[5, 5\]"):
            RouterReplay.set_replay_data([rows[0], with_row(rows[1], 3, [5, 5]), rows[2]])
        RouterReplay.set_replay_data(bad)
        RouterReplay.set_global_router_replay_action(FORWARD)
        with pytest.raises(ReplayError, match=r"layer 2, row 3: .*got \[1, 8\].*range"):
            tiny.forward(chunk, batch)
        RouterReplay.clear_global_router_replay_action()
    with pytest.raises(ReplayError, match="moe_enable_routing_replay=True"):
        install(tiny.megatron_model(hf))


def test_installing_twice_is_installing_once_and_each_is_taken_back(hf: Any) -> None:
    native = RouterReplay.__dict__["get_replay_topk"]
    first = install()
    ours = RouterReplay.__dict__["get_replay_topk"]
    assert ours is not native
    with install() as second:
        assert second is first
        assert RouterReplay.__dict__["get_replay_topk"] is ours
    assert RouterReplay.__dict__["get_replay_topk"] is ours
    first.uninstall()
    assert RouterReplay.__dict__["get_replay_topk"] is native
    first.uninstall()  # a second one does nothing
    with pytest.raises(RuntimeError, match="of the caller"), install():
        raise RuntimeError("of the caller")
    assert RouterReplay.__dict__["get_replay_topk"] is native


def test_uninstall_waits_for_the_backward_pass_of_what_was_replayed(hf: Any) -> None:
    (batch,) = tiny.tokens(1)
    installation = install()
    chunk = native_model(hf, "full")
    RouterReplay.set_replay_data(list(native_api.rows_of(two_routes()[0]).values()))
    RouterReplay.set_global_router_replay_action(FORWARD)
    loss = tiny.forward(chunk, batch).sum()
    with pytest.raises(ReplayError, match="before the backward pass"):
        installation.uninstall()
    loss.backward()
    del loss
    installation.uninstall()


def test_another_interface_is_refused_with_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(RouterReplay):
        def set_target_indices(self, topk_indices: Tensor, valid_mask: Tensor | None = None) -> None:
            """As in a fork."""

    with monkeypatch.context() as patch:
        patch.setattr(RouterReplay, "set_target_indices", Later.set_target_indices)
        with pytest.raises(ReplayError, match=r"megatron-core 0.16.1: RouterReplay.set_target_indices takes .*valid_"):
            install()
    with monkeypatch.context() as patch:
        patch.delattr(RouterReplay, "record_indices")
        with pytest.raises(ReplayError, match=r"RouterReplay\.record_indices is missing, expected"):
            install()
    with monkeypatch.context() as patch:
        patch.setattr(TopKRouter, "routing", lambda self, logits: None)
        with pytest.raises(ReplayError, match=r"TopKRouter.routing takes \('self', 'logits'\), expected"):
            install()
    with monkeypatch.context() as patch:
        patch.setattr(
            megatron_module, "RouterReplayAction", enum.Enum("RouterReplayAction", ["RECORD", "REPLAY_FORWARD", "SKIP"])
        )
        with pytest.raises(ReplayError, match=r"RouterReplayAction has the members .*SKIP"):
            install()


@pytest.mark.parametrize("first", ["install", "patch"])
def test_a_patch_of_other_code_on_the_same_method_does_no_harm(
    hf: Any, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A caller that fills in missing rows by a patch of its own, and keeps them in Megatron's queue for backward."""
    batches, routes = tiny.tokens(2), two_routes(missing=(0, 5, 15))
    right = expected_gradients(hf, routes, batches)

    def patch() -> None:
        original = RouterReplay.get_replay_topk

        @functools.wraps(original)
        def filled(self: Any, scores: Tensor, topk: int, *args: Any) -> Any:
            if self.router_replay_action != FORWARD:
                return original(self, scores, topk, *args)
            live = args[-1](scores, topk)[1]
            ids = torch.where((self.target_topk_idx == -1).all(1, keepdim=True), live, self.target_topk_idx)
            self.replay_backward_list[-1:] = [ids]
            return scores.gather(1, ids), ids

        monkeypatch.setattr(RouterReplay, "get_replay_topk", filled)

    if first == "patch":
        patch()
    with install() as installation:
        chunk = native_model(hf, "full")
        if first == "install":
            patch()
        assert equal(native_api.warm_up_step(chunk, batches, routes, switch=False), right)
        assert equal(native_api.warm_up_step(chunk, batches, routes), right)
        if first == "install":
            with pytest.raises(ReplayError, match="get_replay_topk was replaced by other code after install"):
                installation.uninstall()
            monkeypatch.undo()
    monkeypatch.undo()


def test_a_padding_mask_keeps_padding_out_of_the_counts(hf: Any) -> None:
    """With expert bias, megatron-core 0.16.1 fails on such a mask or masks experts."""
    settings = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    with install():
        chunk = native_model(hf, **settings)
        (router, *_) = native_api.decoder_routers(chunk)
        padding = torch.arange(8)[:, None].expand(8, 2) >= 6
        rows = native_api.rows_of(two_routes()[0])[1]
        router.router_replay.set_target_indices(rows)
        router.router_replay.set_router_replay_action(FORWARD)
        router.routing(torch.randn(8, 2, 8), padding_mask=padding)
        kept = rows[~padding.reshape(-1)]
        assert router.local_tokens_per_expert.tolist() == torch.bincount(kept.flatten(), minlength=8).tolist()


def test_megatron_replay_and_the_native_calls_do_not_meet(hf: Any) -> None:
    """One model with MegatronReplay, another with the native calls, both in one process under install()."""
    (batch,), routes = tiny.tokens(1), two_routes()
    with install():
        chunk = native_model(hf, "full")
        (other,) = tiny.megatron_model(hf)
        replayer = MegatronReplay(other)
        RouterReplay.set_replay_data(list(native_api.rows_of(routes[0]).values()))
        RouterReplay.set_global_router_replay_action(FORWARD)
        loss = tiny.forward(chunk, batch).sum()
        with replayer.replay(routes[1], micro_batch_size=2):
            tiny.forward(other, batch).sum().backward()
        loss.backward()
        assert equal(tiny.gradients(chunk), expected_gradients(hf, routes[:1], [batch]))
        assert equal(tiny.gradients(other), expected_gradients(hf, routes[1:], [batch]))
    assert replayer.stats.rows_replayed == (16, 16, 16)
