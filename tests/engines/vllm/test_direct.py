"""New weights that are written into the tensors of a running vLLM: the plan is vLLM's own, and checked to the bit."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from router_replay.engines import Completion, Request, VllmEngine
from router_replay.engines.vllm.plugin.weights.sources import Weights, open_source
from router_replay.engines.vllm.weights import share
from router_replay.errors import EngineError
from tests.engines.conftest import ENVIRONMENT, GREEDY, SHAPE, Checkpoints, environment, one, prompt, same

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

PLAIN = {"worker_extension_cls": "tests.engines.vllm.plain_kernels.Plain"}


def ask(engine: VllmEngine) -> Completion:
    return one(engine, Request(prompt(), GREEDY))


# -- a real engine whose kernels take the weights as they are -----------------------------------------


@pytest.fixture(scope="module")
def plain_b(checkpoints: Checkpoints) -> Completion:
    """What an engine that was started on B says."""
    with environment(**ENVIRONMENT), VllmEngine(checkpoints.b, **SHAPE, **PLAIN) as engine:
        return ask(engine)


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Iterator[VllmEngine]:
    with environment(**ENVIRONMENT), VllmEngine(checkpoints.a, **SHAPE, **PLAIN) as engine:
        yield engine


def test_weights_written_directly_are_those_of_a_fresh_engine(
    plain: VllmEngine, plain_b: Completion, checkpoints: Checkpoints
) -> None:
    """Fused attention and experts, shared experts, a dense layer, routers with a bias, embeddings and head."""
    on_a = ask(plain)
    assert not same(on_a, plain_b)
    plain.update_weights(checkpoints.b, 1)  # by vLLM's loader, and then checked
    assert same(ask(plain), plain_b)
    report = plain.report()["weights"]
    assert report["seconds_loader"] > 0
    assert report["by_loader"] == {}
    assert report["direct_parameters"] > 4 * 6
    states = {name: load_file(pathlib.Path(folder, "model.safetensors")) for name, folder in vars(checkpoints).items()}
    with share(states["a"]) as shared:
        plain.update_weights(shared, 2)
    assert same(ask(plain), on_a)
    copies = plain.report()["weights"]["copies"]
    assert report["direct_parameters"] <= copies < len(states["a"]) / 2  # the experts of a layer are one copy or two
    for version, folder, expected in (
        (3, checkpoints.b, plain_b),
        (4, checkpoints.b, plain_b),
        (5, checkpoints.a, on_a),
    ):
        plain.update_weights(folder, version)
        assert same(ask(plain), expected)
        report = plain.report()["weights"]
        assert (report["repaired_layers"], report["seconds_direct"] > 0) == (0, True)


def test_weights_of_another_dtype_go_through_the_loader_again(
    plain: VllmEngine, plain_b: Completion, checkpoints: Checkpoints
) -> None:
    state = {name: tensor.double() for name, tensor in load_file(f"{checkpoints.b}/model.safetensors").items()}
    with share(state) as shared:
        plain.update_weights(shared, 6)
        assert plain.report()["weights"]["seconds_direct"] == 0
        plain.update_weights(shared, 7)
        assert plain.report()["weights"]["seconds_direct"] > 0
    assert same(ask(plain), plain_b)


# -- vLLM's own kernels for CPUs ----------------------------------------------------------------------


def test_layers_whose_kernels_pack_their_weights_stay_with_vllms_loader(
    vllm_engine: VllmEngine, vllm_fresh_b: Completion, checkpoints: Checkpoints
) -> None:
    """Norms are written directly; of the others the report says why not."""
    on_a = ask(vllm_engine)
    for version, folder, expected in (
        (1, checkpoints.b, vllm_fresh_b),
        (2, checkpoints.a, on_a),
        (3, checkpoints.b, vllm_fresh_b),
    ):
        vllm_engine.update_weights(folder, version)
        assert same(ask(vllm_engine), expected)
    report = vllm_engine.report()["weights"]
    assert report["direct_parameters"] > 0
    assert report["seconds_direct"] > 0 < report["seconds_loader"]
    reasons = {layer.rpartition(".")[2]: reason for layer, reason in report["by_loader"].items()}
    assert reasons["qkv_proj"] == "its kernel for CPUs holds packed weights"
    assert any("w2_weight has another layout in the kernel" in reason for reason in report["by_loader"].values())
    assert not any("norm" in layer for layer in report["by_loader"])
    vllm_engine.update_weights(checkpoints.a, 0)


# -- the plan, on a model of two parameters -----------------------------------------------------------


class Model(nn.Module):
    """Fuses the rows of `a` and `b`, as vLLM fuses q, k and v; `own` is what the loader of `norm` does."""

    def __init__(self, own: Any = None) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

        super().__init__()
        self.fused, self.norm = nn.Linear(3, 4, bias=False), nn.LayerNorm(3, bias=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.fused.weight.weight_loader = self.place  # type: ignore[assignment]
        self.norm.weight.weight_loader = own or (lambda param, given: param.copy_(given))  # type: ignore[assignment]
        record_metadata_for_reloading(self)

    @staticmethod
    def place(param: torch.Tensor, given: torch.Tensor, row: int) -> None:
        param[row : row + 2].copy_(given)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.weight.weight_loader(self.norm.weight, tensor)  # type: ignore[operator]
            else:
                self.fused.weight.weight_loader(self.fused.weight, tensor, row=2 * (name == "b"))  # type: ignore[operator]


def given(scale: float = 1.0) -> Weights:
    state = {"a": torch.arange(6.0).view(2, 3), "b": -torch.arange(6.0).view(2, 3) - 1, "norm": torch.ones(3)}
    state = {name: tensor * scale for name, tensor in state.items()}
    return Weights("here", {name: (t.dtype, tuple(t.shape)) for name, t in state.items()}, state.__getitem__)


def test_the_plan_is_what_the_loaders_do() -> None:
    from router_replay.engines.vllm.plugin.weights.direct import plan_for

    model = Model()
    model.load_weights(iter(given()))
    plan = plan_for(model, given())
    assert (plan.remaining, plan.reasons, plan.parameters) == (frozenset(), {}, 2)
    plan.write(model, given(3.0))
    expected = Model()
    expected.load_weights(iter(given(3.0)))
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), expected.parameters(), strict=True))


def test_copies_out_of_one_memory_are_joined_and_write_the_same_bits() -> None:
    from router_replay.engines.vllm.plugin.weights.direct import plan_for

    model, expected = Model(), Model()
    model.load_weights(iter(given()))
    plan = plan_for(model, given())
    assert plan.write(model, given(3.0)) == 3
    for scale, order, copies in ((5.0, "a b norm", 2), (7.0, "norm a b", 2), (9.0, "b norm a", 3)):  # other memories
        state = {name: given(scale).read(name) for name in order.split()}
        with share(state) as shared:
            assert plan.write(model, open_source(shared.info())) == copies  # a and b are one where a is the first
        expected.load_weights(iter(given(scale)))
        assert all(torch.equal(*both) for both in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_layer_with_other_values_than_the_plan_would_write_stays_with_the_loader() -> None:
    from router_replay.engines.vllm.plugin.weights.direct import plan_for

    model = Model()
    model.load_weights(iter(given()))
    model.fused.weight.copy_(model.fused.weight.flip(0))  # as a kernel that wants its rows in another order
    plan = plan_for(model, given())
    assert (plan.remaining, set(plan.reasons), plan.parameters) == ({"a", "b"}, {"fused"}, 1)
    assert [name for name, _ in plan.rest(given())] == ["a", "b"]


def test_a_layer_with_a_function_that_holds_packed_weights_stays_with_the_loader() -> None:
    from router_replay.engines.vllm.plugin.weights.direct import plan_for

    model = Model()
    model.load_weights(iter(given()))
    packed = model.fused.weight.clone()
    model.fused.cpu_linear = lambda x, weight: x @ packed.T
    assert set(plan_for(model, given()).reasons) == {"fused"}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda param, given: param.copy_(given + 1), "computes its values"),
        (lambda param, given: param.copy_(given) if given.sum() else None, "need more than names and shapes"),
        (lambda param, given: param.copy_(given).mul_(2), "computes its values"),
    ],
)
def test_loaders_that_do_more_than_copy_leave_everything_to_vllm(own: Any, message: str) -> None:
    from router_replay.engines.vllm.plugin.weights.direct import plan_for

    model = Model(own)
    model.load_weights(iter(given()))
    with pytest.raises(EngineError, match=message):
        plan_for(model, given())
