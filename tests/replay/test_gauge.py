"""What `measure` sums: load, confidence and entropy of every router, in all families and in every kind of pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from router_replay.errors import MeasureError
from router_replay.measure import RouterFigures, expert_load
from router_replay.replay.gauge import RouterGauge
from router_replay.replay.replayer import RouterReplay
from tests.replay import tiny
from tests.replay.test_families import every_family, random_routes
from tests.replay.test_families import model as model  # the fixtures
from tests.replay.test_families import one_thread as one_thread
from tests.replay.test_families import replayer as replayer


def measured(replayer: RouterReplay, model: tiny.Tiny, counted: Tensor | None = None) -> RouterFigures:
    gauge = RouterGauge(replayer.spec)
    with torch.no_grad(), replayer.measure(gauge, counted):
        model.forward()
    return RouterFigures.from_sums(replayer.spec, gauge.take())


def assert_equal(got: RouterFigures, expected: RouterFigures) -> None:
    assert got.rows == expected.rows
    assert np.array_equal(got.load, expected.load)
    assert np.array_equal(got.confidence, expected.confidence)
    assert np.array_equal(got.entropy, expected.entropy)


@every_family
def test_every_family_has_a_load_a_confidence_and_an_entropy(model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.eval()
    spec, rows = replayer.spec, tiny.BATCH * tiny.LENGTH
    routes = random_routes(spec, rows)
    live = measured(replayer, model)
    with replayer.replay(routes):
        replayed = measured(replayer, model)
    with replayer.record() as recording:
        assert_equal(measured(replayer, model), live)
    for figures, used in ((live, recording.routes), (replayed, routes)):
        assert figures.rows == rows
        assert np.array_equal(figures.load, expert_load(used))
        assert np.all((figures.confidence > 0) & (figures.confidence <= 1 + 1e-6))
        assert np.all((figures.entropy >= 0) & (figures.entropy <= math.log(spec.num_experts) + 1e-6))
        assert np.all((figures.imbalance >= 1) & (figures.imbalance <= spec.num_experts / spec.top_k + 1e-9))
    assert replayed.entropy[0] == live.entropy[0]  # the first router has not seen other experts yet


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def sigmoid(logits: Tensor) -> Tensor:
    return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


def root_of_softplus(logits: Tensor) -> Tensor:
    scores = functional.softplus(logits).sqrt()
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("qwen3_moe", softmax),  # the choice comes after the softmax
        ("gpt_oss", softmax),  # and here before it
        ("mixtral", softmax),
        ("mistral4", softmax),  # group-limited
        ("zaya", softmax),  # with a bias for the choice
        ("phimoe", softmax),  # slot by slot
        ("nllb_moe", softmax),
        ("deepseek_v3", sigmoid),  # group-limited, with a bias for the choice
        ("minimax_m2", sigmoid),
        ("inkling", sigmoid),  # scores its shared experts in the same call
        ("llama4", sigmoid),  # of the logits, after the choice
        ("deepseek_v4", root_of_softplus),
    ],
)
def test_the_distribution_is_the_routers_own(family: str, rule: Any, model: tiny.Tiny, replayer: RouterReplay) -> None:
    """The logits are read where the router multiplies with its weight, not from the code under test."""
    model.model.eval()
    spec, site = replayer.spec, replayer._found.routers[-1]
    linear, seen = functional.linear, []

    def watched(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        out = linear(x, weight, *more)
        if any(weight is own for own in site.module.parameters()) and out.shape[-1] >= spec.num_experts:
            seen.append(out.detach().reshape(-1, out.shape[-1])[:, : spec.num_experts].float())
        return out

    with pytest.MonkeyPatch.context() as patch, replayer.record() as recording:
        patch.setattr(functional, "linear", watched)
        figures = measured(replayer, model)
    probabilities = rule(seen[-1])
    chosen = torch.from_numpy(recording.routes.ids[:, -1].astype(np.int64))
    mass = probabilities.gather(-1, chosen).sum(-1).mean()
    entropy = -(probabilities * probabilities.log()).sum(-1).mean()
    assert figures.confidence[-1] == pytest.approx(float(mass), rel=1e-5)
    assert figures.entropy[-1] == pytest.approx(float(entropy), rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_only_the_tokens_of_the_mask_count(model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.eval()
    counted = torch.zeros(tiny.BATCH * tiny.LENGTH, dtype=torch.bool)
    counted[[0, 3, 7]] = True
    with replayer.record() as recording:
        figures = measured(replayer, model, counted)
    assert figures.rows == 3
    expected = [np.bincount(recording.routes.ids[counted.numpy(), layer].ravel(), minlength=8) for layer in range(3)]
    assert np.array_equal(figures.load, np.stack(expected))
    parts = [measured(replayer, model, mask) for mask in (counted, ~counted)]
    whole = measured(replayer, model)
    mean = (parts[0].confidence * 3 + parts[1].confidence * 9) / 12
    assert np.allclose(mean, whole.confidence, rtol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_measuring_changes_nothing_and_a_recompute_is_not_counted(
    family: str, reentrant: bool, model: tiny.Tiny, replayer: RouterReplay
) -> None:
    model.model.train()
    found = []
    for measures in (False, True):
        model.model.zero_grad(set_to_none=True)
        model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        gauge = RouterGauge(replayer.spec)
        try:
            with replayer.replay(random_routes(replayer.spec, 12)):
                if measures:
                    with replayer.measure(gauge):
                        out = model.forward()
                else:
                    out = model.forward()
                out.float().square().sum().backward()
        finally:
            model.model.gradient_checkpointing_disable()
        grads = {name: one.grad.clone() for name, one in model.model.named_parameters() if one.grad is not None}
        found.append((out.detach(), grads))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items())
    assert RouterFigures.from_sums(replayer.spec, gauge.take()).rows == 12


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_a_gauge_begins_anew_after_each_reading(model: tiny.Tiny, replayer: RouterReplay) -> None:
    gauge = RouterGauge(replayer.spec)
    with torch.no_grad(), replayer.measure(gauge):
        model.forward()
        model.forward()
    twice = gauge.take()
    assert twice[0] == 24
    assert not gauge.take().any()
    figures = RouterFigures.from_sums(replayer.spec, gauge.take())
    assert figures.rows == 0
    assert np.isnan(figures.confidence).all()
    assert np.isnan(figures.imbalance).all()
    with pytest.raises(MeasureError, match=r"must have 31 entries, got \[30\]"):
        RouterFigures.from_sums(replayer.spec, twice[:-1])
