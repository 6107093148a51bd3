"""A model computes with bfloat16 copies; what is trained and saved are its float32 weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from router_replay.rl.policy.master_weights import MasterWeights


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    return model


def step(model: nn.Module, weights: MasterWeights, times: int = 1) -> None:
    with weights.computing():
        for _ in range(times):
            model(torch.arange(8)).float().square().sum().backward()


def test_the_model_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    model = tied_model()
    before = dict(model.named_parameters())
    weights = MasterWeights(model, torch.bfloat16)
    with weights.computing():
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model[2].weight is model[0].weight
    assert all(after is before[name] for name, after in model.named_parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_changed_weight_is_cast_before_the_next_pass() -> None:
    model = tied_model()
    weights = MasterWeights(model, torch.bfloat16)
    step(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.step()
    weights.changed()
    with weights.computing():
        seen = model[1].weight.detach().clone()
    assert torch.equal(seen, model[1].weight.detach().bfloat16())


def test_weights_are_cast_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied_model()
    weights = MasterWeights(model, torch.bfloat16)
    casts = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: casts.append(args))
    for _ in range(3):
        step(model, weights)
    assert casts == []
    weights.changed()
    for _ in range(3):
        step(model, weights)
    assert len(casts) == 1


def test_gradients_of_several_passes_are_added_in_float32() -> None:
    one, many = tied_model(), tied_model()
    step(one, MasterWeights(one, torch.bfloat16))
    step(many, MasterWeights(many, torch.bfloat16), times=3)
    for single, sum_of_three in zip(one.parameters(), many.parameters(), strict=True):
        assert single.grad is not None
        assert single.grad.dtype == torch.float32
        assert torch.allclose(sum_of_three.grad, 3 * single.grad, rtol=1e-6)


def test_kept_modules_compute_with_their_own_weights() -> None:
    model = tied_model()
    weights = MasterWeights(model, torch.bfloat16, kept=(model[1],))
    with weights.computing():
        assert model[1].weight.dtype == torch.float32
        assert model[0].weight.dtype == torch.bfloat16
