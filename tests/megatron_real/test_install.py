"""Code written for Megatron's own RouterReplay, alone and with install(): what goes wrong alone goes right with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.replay.megatron import install
from tests.makers import random_routes
from tests.megatron_real import native_api, tiny
from tests.megatron_real.native_api import SPEC, equal, expected_gradients, native_model, two_routes, with_row
from tests.megatron_real.test_one_rank import same

FORWARD, BACKWARD = RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD


@pytest.fixture(scope="module")
def hf() -> Any:
    tiny.start()
    return tiny.hf_model()


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    with native_api.untouched():
        yield


# -- recompute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "moe"])
def test_a_forgotten_switch_gives_wrong_router_gradients_alone_and_right_ones_with_install(hf: Any, kind: str) -> None:
    batches, routes = tiny.tokens(2), two_routes()
    right = expected_gradients(hf, routes, batches)
    alone = native_api.warm_up_step(native_model(hf, kind), batches, routes, switch=False)
    router = "decoder.layers.1.mlp.router.weight"
    assert (alone[router] - right[router]).norm() > 0.1 * right[router].norm()
    RouterReplay.clear_global_router_replay_instances()
    with install() as installation:
        chunk = native_model(hf, kind)
        assert equal(native_api.warm_up_step(chunk, batches, routes, switch=False), right)
        assert equal(native_api.warm_up_step(chunk, batches, routes, switch=True), right)
        assert installation.stats.layers == (1, 2, 3)
        assert installation.stats.rows_replayed == (64, 64, 64)
        assert installation.stats.rows_live == (0, 0, 0)
        assert installation.stats.passes == 4


def test_backward_passes_may_run_in_any_order(hf: Any) -> None:
    """Megatron's queue gives the first rows to the first recompute, whichever it is."""
    batches, routes = tiny.tokens(2), two_routes()
    right = expected_gradients(hf, routes, batches)

    def close(found: dict[str, Tensor]) -> bool:
        return all(torch.allclose(found[name], right[name], atol=1e-5) for name in right)

    assert not close(native_api.warm_up_step(native_model(hf, "full"), batches, routes, order=(1, 0)))
    RouterReplay.clear_global_router_replay_instances()
    with install():
        assert close(native_api.warm_up_step(native_model(hf, "full"), batches, routes, order=(1, 0)))


@pytest.mark.parametrize("switch", [True, False])
def test_a_failed_or_forward_only_step_leaves_no_rows_for_the_next(hf: Any, switch: bool) -> None:
    batches, routes = tiny.tokens(2), two_routes()
    other = [random_routes(16, SPEC, seed) for seed in (7, 8)]

    def steps(chunk: Any) -> tiny.Step:
        native_api.replay_step([chunk], batches, other, clear=False, forward_only=True)
        with pytest.raises(RuntimeError, match="micro-batch 1 fails"):
            native_api.replay_step([chunk], batches, other, fail_at=1)
        return native_api.replay_step([chunk], batches, routes, switch)

    clean = native_api.replay_step([native_model(hf, "full")], batches, routes)
    if switch:  # the queue still holds the rows of the earlier steps
        RouterReplay.clear_global_router_replay_instances()
        with pytest.raises(AssertionError):
            same(steps(native_model(hf, "full")), clean)
    RouterReplay.clear_global_router_replay_instances()
    with install():
        same(steps(native_model(hf, "full")), clean)


def test_a_tensor_that_the_caller_fills_again_does_not_change_the_recompute(hf: Any) -> None:
    (batch,), routes = tiny.tokens(1), two_routes()
    with install():
        chunk = native_model(hf, "full")
        buffers = [rows.clone() for rows in native_api.rows_of(routes[0]).values()]
        RouterReplay.set_replay_data(buffers)
        RouterReplay.set_global_router_replay_action(FORWARD)
        loss = tiny.forward(chunk, batch).sum()
        for buffer, rows in zip(buffers, native_api.rows_of(routes[1]).values(), strict=True):
            buffer.copy_(rows)
        loss.backward()
        assert equal(tiny.gradients(chunk), expected_gradients(hf, routes[:1], [batch]))


def test_a_recompute_records_nothing(hf: Any) -> None:
    batches = tiny.tokens(2)
    with install():
        chunk = native_model(hf, "full")
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        losses, recorded = [], []
        for batch in batches:
            losses.append(tiny.forward(chunk, batch).sum())
            recorded.append([rows.clone() for rows in RouterReplay.get_recorded_data()])
        losses[0].backward()  # alone, Megatron would now hold the first micro-batch again
        assert all(torch.equal(a, b) for a, b in zip(RouterReplay.get_recorded_data(), recorded[1], strict=True))
        losses[1].backward()
        RouterReplay.clear_global_router_replay_action()
        live = tiny.gradients(chunk)
        chunk.zero_grad()
        for batch, rows in zip(batches, recorded, strict=True):  # R2: what was recorded gives the same bits again
            RouterReplay.set_replay_data(rows)
            RouterReplay.set_global_router_replay_action(FORWARD)
            tiny.forward(chunk, batch).sum().backward()
        assert equal(tiny.gradients(chunk), live)


# -- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "full"])
def test_missing_rows_route_live_and_their_recompute_uses_the_same_experts(hf: Any, kind: str) -> None:
    batches, routes = tiny.tokens(2), two_routes(missing=(0, 5, 15))
    right = expected_gradients(hf, routes, batches)
    with install() as installation:
        assert equal(native_api.warm_up_step(native_model(hf, kind), batches, routes), right)
        assert installation.stats.rows_live == (6, 6, 6)
        assert installation.stats.rows_replayed == (26, 26, 26)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_rows_may_have_any_integer_type(hf: Any, dtype: torch.dtype) -> None:
    (batch,), routes = tiny.tokens(1), two_routes()[:1]
    with install():
        chunk = native_model(hf)
        RouterReplay.set_replay_data([rows.to(dtype) for rows in native_api.rows_of(routes[0]).values()])
        RouterReplay.set_global_router_replay_action(FORWARD)
        tiny.forward(chunk, batch).sum().backward()
        assert equal(tiny.gradients(chunk), expected_gradients(hf, routes, [batch]))


BAD = {
    "too few slots": (lambda rows: rows[:, :1], "layer 2: each row must have 2 experts"),
    "an expert twice": (lambda rows: with_row(rows, 3, [5, 5]), r"layer 2, row 3: .*got \[5, 5\].*twice"),
    "zeros": (lambda rows: with_row(rows, 3, [0, 0]), r"layer 2, row 3: .*got \[0, 0\].*twice"),
    "out of range": (lambda rows: with_row(rows, 3, [1, 8]), r"layer 2, row 3: .*of 8 experts.*got \[1, 8\].*range"),
    "half missing": (lambda rows: with_row(rows, 3, [1, -1]), r"layer 2, row 3: .*got \[1, -1\]"),
    "fractions": (lambda rows: rows.float(), r"layer 2: .*integers, got torch.float32 \[16, 2\]"),
    "a list": (lambda rows: rows.tolist(), "layer 2: .*got list"),
    "other lengths": (lambda rows: rows[:12], r"one micro-batch, got \[12, 16\] rows"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_rows_raise_where_they_enter_and_none_of_them_is_kept(hf: Any, name: str) -> None:
    change, message = BAD[name]
    with install():
        chunk = native_model(hf)
        rows = list(native_api.rows_of(two_routes()[0]).values())
        rows[1] = change(rows[1])
        with pytest.raises(ReplayError, match=message):
            RouterReplay.set_replay_data(rows)
        assert all(router.router_replay.target_topk_idx is None for router in native_api.decoder_routers(chunk))
        if name != "other lengths":
            with pytest.raises(ReplayError, match=message):
                RouterReplay.global_router_replay_instances[1].set_target_indices(rows[1])


def test_megatron_alone_takes_rows_that_no_router_would_choose(hf: Any) -> None:
    """What install() is for: alone, a row with one expert twice runs through, and half of its weight is lost."""
    (batch,) = tiny.tokens(1)
    chunk = native_model(hf)
    rows = list(native_api.rows_of(two_routes()[0]).values())
    RouterReplay.set_replay_data([rows[0], with_row(rows[1], 3, [5, 5]), rows[2]])
    RouterReplay.set_global_router_replay_action(FORWARD)
    assert torch.isfinite(tiny.forward(chunk, batch)).all()


def test_rows_of_another_length_or_without_need_raise_in_the_forward_pass(hf: Any) -> None:
    (batch,) = tiny.tokens(1)
    with install():
        chunk = native_model(hf)
        rows = list(native_api.rows_of(two_routes()[0]).values())
        with pytest.raises(ReplayError, match=r"expected the rows of 3 routers .* got 2"):
            RouterReplay.set_replay_data(rows[:2])
        RouterReplay.set_global_router_replay_action(FORWARD)
        with pytest.raises(ReplayError, match="layer 1: a forward pass runs with REPLAY_FORWARD, and there"):
            tiny.forward(chunk, batch)
        RouterReplay.set_replay_data([one[:12] for one in rows])
        with pytest.raises(ReplayError, match="layer 1: the router got 16 tokens, and the rows are those of 12"):
            tiny.forward(chunk, batch)
        RouterReplay.set_replay_data(rows)
        tiny.forward(chunk, batch)
        with pytest.raises(ReplayError, match="there are no rows for it"):  # those of the last pass are used up
            tiny.forward(chunk, batch)
        RouterReplay.set_global_router_replay_action(BACKWARD)  # and a forward pass takes none from the queue
        with pytest.raises(ReplayError, match="runs with REPLAY_BACKWARD, and there are no rows"):
            tiny.forward(chunk, batch)
        RouterReplay.clear_global_router_replay_action()
        tiny.forward(chunk, batch)


def test_settings_that_bypass_replay_are_refused_when_it_is_asked_for(hf: Any) -> None:
    with install():
        chunk = native_model(hf)
        rows = list(native_api.rows_of(two_routes()[0]).values())
        for setting, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")):
            before = getattr(chunk.config, setting)
            setattr(chunk.config, setting, value)
            with pytest.raises(ReplayError, match=f"cannot be replayed with {setting}="):
                RouterReplay.set_replay_data(rows)
            with pytest.raises(ReplayError, match=f"cannot be replayed with {setting}="):
                RouterReplay.set_global_router_replay_action(FORWARD)
            setattr(chunk.config, setting, before)
        RouterReplay.set_replay_data(rows)
