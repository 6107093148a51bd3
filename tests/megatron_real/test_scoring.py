"""The same weights in transformers and megatron-core under the same routes: equal losses, gate weights, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from torch import Tensor

from router_replay import RouterReplay, Routes, measure
from router_replay.replay.megatron import MegatronReplay
from tests.makers import random_routes
from tests.megatron_real import tiny

MODELS: dict[str, Callable[[], Any]] = {
    "softmax after the choice": tiny.hf_model,
    "softmax before the choice": lambda: tiny.hf_model(norm_topk_prob=False),
    "sigmoid, bias, groups, scaling": tiny.glm_model,
    "sigmoid, bias": lambda: tiny.glm_model(n_group=1, topk_group=1),
    "sigmoid": lambda: tiny.glm_model(n_group=1, topk_group=1, bias=0.0),
}


def settings(name: str) -> dict[str, Any]:
    return {"moe_router_enable_expert_bias": False} if name == "sigmoid" else {}


@pytest.fixture(autouse=True)
def one_process() -> None:
    tiny.start()


@pytest.mark.parametrize("missing", [0, 5])
@pytest.mark.parametrize("name", list(MODELS))
def test_megatron_and_transformers_agree_under_the_same_routes(name: str, missing: int) -> None:
    hf = MODELS[name]()
    chunks, batches = tiny.megatron_model(hf, **settings(name)), tiny.tokens(2)
    ours, theirs = MegatronReplay(chunks), RouterReplay(hf)
    assert ours.spec == theirs.spec
    captured = np.arange(16) >= missing
    routes = [Routes(random_routes(16, ours.spec, n).ids, ours.spec, captured=captured) for n in range(2)]
    with ours.replay(routes, micro_batch_size=2), ours.record() as recording:
        step = tiny.train_step(chunks, batches)
    used = []
    for number, (batch, rows) in enumerate(zip(batches, routes, strict=True)):
        with theirs.replay(rows), theirs.record() as recorded:
            losses = tiny.hf_losses(hf, batch)
            (losses.sum() / len(batches)).backward()
        used.append(recorded.routes)
        gap = measure.logprob_gap(-step.losses[number], -losses.detach(), np.ones(losses.shape, bool))
        assert gap.k3 < 1e-6
        close(step.losses[number], losses)
    for mine, other in zip(recording.gather(), used, strict=True):
        assert mine.same_sets(other)
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    assert step.gradients[0]
    for parameter, gradient in step.gradients[0].items():
        close(gradient, tiny.from_hf(chunks[0], parameter, gradients))


@pytest.mark.parametrize("name", list(MODELS))
def test_gate_weights_equal_those_of_transformers(name: str) -> None:
    hf = MODELS[name]()
    chunks, (batch,) = tiny.megatron_model(hf, **settings(name)), tiny.tokens(1)
    ours, theirs = MegatronReplay(chunks), RouterReplay(hf)
    routes = random_routes(16, ours.spec)
    mine, other = gate_weights(chunks[0]), hf_gate_weights(hf)
    with torch.no_grad(), ours.replay(routes, micro_batch_size=2):
        tiny.forward(chunks[0], batch)
    with torch.no_grad(), theirs.replay(routes):
        tiny.hf_losses(hf, batch)
    assert len(mine) == len(other) == len(ours.spec.layers)
    for number, (here, there) in enumerate(zip(mine, other, strict=True)):
        in_token_order = here.view(8, 2, -1).transpose(0, 1).reshape(16, -1)
        ids = torch.from_numpy(routes.ids[:, number].astype(np.int64))
        assert torch.count_nonzero(in_token_order) == 16 * ours.spec.top_k
        close(in_token_order.gather(1, ids), there)


def gate_weights(chunk: Any) -> list[Tensor]:
    """The weights [T, E] that megatron's routers give, in the order of the calls."""
    found: list[Tensor] = []
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(lambda module, args, out: found.append(out[0].detach()))
    return found


def hf_gate_weights(hf: Any) -> list[Tensor]:
    """The weights [T, K] that reach the experts of a transformers model, in the order of the calls."""
    found: list[Tensor] = []
    for layer in hf.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_hook(lambda module, args, out: found.append(args[2].detach()))
    return found


def close(got: Tensor, expected: Tensor) -> None:
    """Assert equality within 1e-5 of the largest value, or absolutely where that is below one."""
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
