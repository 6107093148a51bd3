"""The engine gets the policy's weights when they changed, adapters merged; the reference stays live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

import torch
from peft import LoraConfig

from tests.trl_real.makers import Losses, gap

Make = Callable[..., Any]


def test_weights_are_pushed_once_for_each_change(make: Make) -> None:
    """Four generations at two steps of the optimizer, since it accumulates over two generations."""
    made = make("r3", steps_per_generation=1, gradient_accumulation_steps=2, max_steps=2)
    made.train()
    assert len(made.engine.answers) == 4 * 8
    assert made.engine.pushes == made.engine.version == 2


def test_the_engine_samples_with_the_weights_that_are_trained(make: Make) -> None:
    made = make("r3", max_steps=4)
    made.train()
    made.vllm_generation.sync_weights()
    engine = made.engine._model.state_dict()
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(engine[name], tensor.to(torch.bfloat16)), name
    assert made.engine.pushes == 3


def test_an_adapter_is_trained_with_replay_and_merged_for_the_engine(make: Make) -> None:
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
    made = make("r3", kind=Losses, trainer_peft_config=lora, max_steps=4, learning_rate=1e-2)
    base = {name: tensor.clone() for name, tensor in made.model.state_dict().items() if "lora" not in name}
    made.train()
    assert gap(*made.seen[0]) < 1e-5
    assert gap(*made.seen[2]) < 1e-5  # the first pass after new weights
    assert all(entry["routes/live"] == 0 for entry in made.state.log_history if "routes/live" in entry)
    made.vllm_generation.sync_weights()
    name = "model.layers.0.self_attn.q_proj"
    merged = made.model.base_model.model.get_submodule(name)
    expected = merged.base_layer.weight + merged.get_delta_weight("default")
    assert torch.equal(made.engine._model.state_dict()[f"{name}.weight"], expected.to(torch.bfloat16))
    assert not torch.equal(expected, base[f"base_model.model.{name}.base_layer.weight"])


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_is_routed_live(make: Make, adapter: bool) -> None:
    """With an adapter the reference is the same model with the adapter switched off."""
    more = {"trainer_peft_config": LoraConfig(target_modules=["q_proj"], r=4)} if adapter else {}
    made = make("r3", beta=0.1, max_steps=1, **more)
    replayed = []

    def watch(module: Any, *_: Any) -> None:
        replayed.append((made.replayer._state.decide()[0] is not None, module.training))

    policy = made.model.base_model.model if adapter else made.model
    policy.model.register_forward_pre_hook(watch)
    if not adapter:
        made.ref_model.model.register_forward_pre_hook(lambda *_: replayed.append("reference"))
    made.train()
    # Two chunks of the old pass, two of the reference, one of the loss.
    policy_passes = [one[0] for one in replayed if one != "reference"]
    if adapter:
        assert policy_passes == [True, True, False, False, True]
    else:
        assert replayed.count("reference") == 2
        assert policy_passes == [True, True, True]
    assert made.state.log_history[0]["kl"] >= 0
