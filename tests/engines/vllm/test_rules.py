"""The rule of a router is found by asking it; forcing follows it, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from router_replay.engines.vllm.plugin.routes.rules import Rule, find_rule, force
from router_replay.errors import EngineError

pytest.importorskip("vllm")
E, K, T = 16, 4, 40
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """vLLM's grouped top-k is compiled; half a minute of inductor would prove nothing here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def cpu_router(**arguments: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    return CPURouter(K, E, **arguments)


def grouped_router(**arguments: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    return GroupedTopKRouter(K, E, 4, 2, **arguments)


def custom_router(function: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter

    return CustomRoutingRouter(K, E, function)


def llama4(hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
    scores, ids = torch.topk(gating_output, topk, dim=-1)
    return scores.float().sigmoid(), ids.int()


def squared(hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
    scores, ids = torch.topk(gating_output, topk, dim=-1)
    return scores.float().square(), ids.int()


BIAS = torch.linspace(-1, 1, E)
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
ROUTERS = {
    "softmax": (lambda: cpu_router(), ("softmax", True, 1.0)),
    "softmax, not renormalised": (lambda: cpu_router(renormalize=False), ("softmax", False, 1.0)),
    "grouped softmax": (lambda: cpu_router(**GROUPED, renormalize=False), ("softmax", False, 1.0)),
    "grouped sigmoid, bias, scale": (
        lambda: cpu_router(**GROUPED, scoring_func="sigmoid", e_score_correction_bias=BIAS, routed_scaling_factor=2.5),
        ("sigmoid", True, 2.5),
    ),
    "GroupedTopKRouter": (
        lambda: grouped_router(scoring_func="sigmoid", e_score_correction_bias=BIAS, routed_scaling_factor=2.5),
        ("sigmoid", True, 2.5),
    ),
    "GroupedTopKRouter, softmax": (lambda: grouped_router(renormalize=False), ("softmax", False, 1.0)),
    "llama 4": (lambda: custom_router(llama4), ("sigmoid", False, 1.0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_rule_is_the_routers(name: str, dtype: torch.dtype) -> None:
    make, (score, renormalize, scale) = ROUTERS[name]
    rule = find_rule(make(), 8, dtype, CPU)
    assert (rule.score, rule.renormalize, rule.scale) == (score, renormalize, scale)


@pytest.mark.parametrize("name", ROUTERS)
def test_forcing(name: str) -> None:
    router = ROUTERS[name][0]()
    rule = find_rule(router, 8, torch.float32, CPU)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(T, E, generator=generator)
    weights, ids = router._compute_routing(torch.zeros(T, 8), logits.clone(), None)

    free = force(rule, weights, ids, logits, torch.full((T, 1, K), -1, dtype=torch.int32), 0)
    assert torch.equal(free[0], weights)
    assert torch.equal(free[1], ids)

    own = force(rule, weights, ids, logits, ids.sort(dim=-1).values.int()[:, None], 0)
    assert torch.equal(own[0], weights)  # to the bit, and in the router's own slot order
    assert torch.equal(own[1], ids)

    wanted = torch.rand(T, E, generator=generator).topk(K).indices.int()
    wanted[::2] = -1
    forced = force(rule, weights, ids, logits, wanted[:, None], 0)
    assert torch.equal(forced[1][1::2], wanted[1::2])
    assert torch.equal(forced[1][::2], ids[::2])
    assert torch.equal(forced[0][::2], weights[::2])
    expected = Rule(rule.score, rule.renormalize, rule.scale, True).weights(logits, wanted.clamp(min=0).long())
    assert torch.allclose(forced[0][1::2], expected[1::2])
    assert forced[0].dtype == weights.dtype
    assert forced[1].dtype == ids.dtype


@pytest.mark.parametrize(("interpreted", "says"), [("1", "144 cases"), ("0", "compiled for an H200")])
def test_the_kernel_of_a_gpu_forces_as_the_cpu_does(interpreted: str, says: str) -> None:
    """The interpreter runs it, and the compiler accepts it. Triton must know which of them before it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.force_check"],
        env={**os.environ, "TRITON_INTERPRET": interpreted},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == says, done.stderr[-2000:]


def test_a_rule_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        EngineError, match="CustomRoutingRouter computes expert weights by a rule that forced routing does not"
    ):
        find_rule(custom_router(squared), 8, torch.float32, CPU)


class Layer(torch.nn.Module):
    """What is read of a MoE layer of vLLM."""

    layer_id = 0
    do_naive_dispatch_combine = False

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.router = cpu_router()
        self._quant_method = SimpleNamespace(is_monolithic=False)
        self.moe_config = SimpleNamespace(is_sequence_parallel=False)
        for name, value in changes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        (
            {"_quant_method": SimpleNamespace(is_monolithic=True)},
            (0,),
            r"0 uses a monolithic MoE kernel .* choose a modular kernel.* --moe-backend triton",
        ),
        ({"do_naive_dispatch_combine": True}, (0,), "0: its kernel gathers the tokens of all ranks before routing"),
        ({"moe_config": SimpleNamespace(is_sequence_parallel=True)}, (0,), "0: sequence parallelism splits the tokens"),
        ({}, (0, 1), r"routers in layers \[0\], expected \[0, 1\] from its config"),
    ],
)
def test_layers_in_which_no_rows_can_be_forced_are_refused(changes: Any, layers: Any, message: str) -> None:
    from router_replay.engines.vllm.plugin.routes.forcing import find_routers
    from router_replay.spec import RouterSpec

    with pytest.raises(EngineError, match=message):
        find_routers(torch.nn.Sequential(Layer(**changes)), RouterSpec(E, K, layers))
    assert len(find_routers(torch.nn.Sequential(Layer()), RouterSpec(E, K, (0,)))) == 1


@pytest.mark.parametrize(
    ("parallel", "more", "reason"),
    [
        ({"pipeline_parallel_size": 2}, {}, "pipeline parallelism"),
        ({"prefill_context_parallel_size": 2}, {}, "prefill context parallelism"),
        ({"use_ubatching": True}, {}, "dual batch overlap"),
        ({}, {"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)}, "fast prefill"),
        ({}, {"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_unsupported_combinations_are_refused_with_the_reason(parallel: Any, more: Any, reason: str) -> None:
    from router_replay.engines.vllm.plugin.routes.forcing import refuse_unsupported

    one_process = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "use_ubatching": False}
    plain = {
        "speculative_config": None,
        "parallel_config": SimpleNamespace(**one_process),
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
    }
    refuse_unsupported(SimpleNamespace(**plain))
    changed = {**plain, "parallel_config": SimpleNamespace(**{**one_process, **parallel}), **more}
    with pytest.raises(EngineError, match=reason):
        refuse_unsupported(SimpleNamespace(**changed))
