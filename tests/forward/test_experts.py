"""Experts that gather compute the bits of transformers' grouped product, and its gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from router_replay.forward.experts import NAME, use_gathering_experts
from tests.replay import tiny


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "nemotron_h"])
def test_forward_is_equal_to_the_bit_and_gradients_to_rounding(family: str) -> None:
    """gpt_oss has biases and nemotron_h has experts without a gate."""
    theirs = tiny.make(family)
    theirs.model.set_experts_implementation("grouped_mm")
    mine = copy.deepcopy(theirs)
    assert use_gathering_experts(mine.model)
    assert mine.model.config._experts_implementation == NAME

    def run(one: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = one.forward()
        out.square().sum().backward()
        return out, {name: weight.grad for name, weight in one.model.named_parameters() if weight.grad is not None}

    (expected, expected_grads), (got, grads) = run(theirs), run(mine)
    assert torch.equal(got, expected)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, expected_grads[name], rtol=1e-3, atol=1e-5), name


def test_other_experts_are_left_alone() -> None:
    model = tiny.make("qwen3_moe").model
    model.set_experts_implementation("eager")
    assert not use_gathering_experts(model)
    assert model.config._experts_implementation == "eager"
