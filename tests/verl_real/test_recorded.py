"""R2 in verl's FSDP engines: the old-policy pass records, the update replays. And LoRA, whose reference stays live."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.verl_real import tiny

# isort: split
from router_replay import logprobs, pack
from router_replay.errors import ReplayError
from tests.verl_real.test_engine import CLOSE, ROWS, largest, next_token_logprobs

TOKENS = ROWS + len(tiny.LENGTHS)


def without_routes(**settings: Any) -> Any:
    return tiny.batch_of(tiny.rollouts(), **settings).exclude("routed_experts")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_old_pass_records_and_the_update_replays(model: str, strategy: str, packed: bool) -> None:
    engine = tiny.engine(model, "R2", strategy, use_remove_padding=packed)
    scored = tiny.score(engine, without_routes(use_remove_padding=packed))
    recorded = scored["routed_experts"]
    assert recorded.dtype == torch.int16
    assert [tuple(part.shape) for part in recorded.unbind()] == [(p + r, 3, 2) for p, r in tiny.LENGTHS]

    module, replayer = tiny.plain(model)
    for sample, part in zip(tiny.samples_of(tiny.rollouts()), recorded.unbind(), strict=True):
        with replayer.record() as expected:
            logprobs(module, pack([sample], max_tokens=64))
        assert torch.equal(part[:, 1:].sort(-1).values, expected.tensors.ids.to(torch.int16).sort(-1).values)
        assert not part[:, 0].any()  # the dense layer

    data = without_routes(use_remove_padding=packed)
    data["routed_experts"] = recorded
    metrics, _ = tiny.train(engine, data)
    assert metrics["routes/replayed"] == [TOKENS]
    assert metrics["routes/live"] == [0]


def test_the_update_uses_what_was_recorded_and_not_the_routes_of_its_own_weights(model: str) -> None:
    outputs = tiny.rollouts()
    _, gradients = tiny.ours(model, outputs)
    metrics, trained = tiny.train(tiny.engine(model, "R2"), tiny.batch_of(outputs))
    assert metrics["routes/replayed"] == [ROWS]
    for name, gradient in gradients.items():
        torch.testing.assert_close(trained[name], gradient, rtol=1e-4, atol=1e-4)


def test_an_update_without_a_recording_is_refused(model: str) -> None:
    with pytest.raises(ReplayError, match=r"compute_log_prob must run first, and .*bypass_mode=True skips it"):
        tiny.train(tiny.engine(model, "R2"), without_routes())


def test_r2_refuses_a_rollout_that_captures_too(model: str) -> None:
    with pytest.raises(ReplayError, match=r"set rollout\.enable_rollout_routing_replay=False, which belongs to R3"):
        tiny.score(tiny.engine(model, "R2"), tiny.batch_of(tiny.rollouts()))


def test_r3_without_the_routes_of_the_rollout_is_refused(model: str) -> None:
    with pytest.raises(ReplayError, match=r"set actor_rollout_ref\.rollout\.enable_rollout_routing_replay=True"):
        tiny.score(tiny.engine(model, "R3"), without_routes())


@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_lora_replays_and_its_reference_is_live(model: str, strategy: str, mode: str) -> None:
    """The reference policy is the actor without its adapter, which has no effect before the first step."""
    outputs = tiny.rollouts()
    expected, _ = tiny.ours(model, outputs)
    live, _ = tiny.ours(model, outputs, live=True)
    engine = tiny.engine(model, mode, strategy, lora_rank=4, target_modules=["q_proj", "v_proj"])
    with engine.disable_adapter():
        reference = tiny.score(engine, tiny.batch_of(outputs))
    assert largest(next_token_logprobs(reference), live) < CLOSE
    assert "routed_experts" not in reference
    assert reference["metrics"] == {}
    if mode == "R3":
        assert largest(next_token_logprobs(tiny.score(engine, tiny.batch_of(outputs))), expected) < CLOSE

    metrics, trained = tiny.train(engine, tiny.batch_of(outputs))
    assert metrics["routes/replayed"] == [ROWS]
    moved = {name for name, value in trained.items() if value.any()}
    assert moved
    assert all("lora" in name for name in moved)
