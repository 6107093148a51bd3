"""Let vLLM compute the logits of its routers in float32, if ROUTER_REPLAY_VLLM_ROUTER_DTYPE asks for it.

vLLM's MoE runner holds the linear layer that computes the logits. Its weights become float32 before they are loaded,
so that neither a checkpoint nor a weight update in float32 is rounded, and its input is cast. The runner's router then
chooses from float32 logits, as it does in models that vLLM itself runs in this way.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from router_replay.engines.vllm.plugin import ROUTER_DTYPE, seams
from router_replay.errors import EngineError

FLOAT32 = "float32"


def asked_for() -> bool:
    """Return whether float32 was asked for; raise EngineError for another value."""
    value = os.environ.get(ROUTER_DTYPE, "")
    if value not in ("", FLOAT32):
        raise EngineError(f'{ROUTER_DTYPE}={value}: expected "{FLOAT32}", or that the variable is not set')
    return value == FLOAT32


def install() -> None:
    """Wrap the constructor of the MoE runner if float32 was asked for; raise EngineError if it does not fit."""
    if not asked_for():
        return
    if problems := seams.problems("precision"):
        raise EngineError(f"{ROUTER_DTYPE}={FLOAT32} does not work in this vLLM: {'; '.join(problems)}")
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    seams.wrap(MoERunner, "__init__", _converting)


def refuse_unconverted(model: Any) -> None:
    """Raise EngineError if float32 was asked for and this model has no converted router: vLLM only logs a failure."""
    if asked_for() and not any(getattr(module, "router_replay_float32", False) for module in model.modules()):
        raise EngineError(f"{ROUTER_DTYPE}={FLOAT32}: no router of this model computes in float32; vLLM's log says why")


def _converting(original: Any) -> Any:
    def __init__(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        if asked_for():  # a later engine of the same process may not ask for it
            _convert(self)

    return __init__


def _convert(runner: Any) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    gate, reason = runner.gate, ""
    if gate is None:
        reason = "the model computes its router's logits outside vLLM's MoE runner"
    elif runner.shared_expert_gate is not None:
        reason = "its router and the gate of its shared expert are one matrix"
    elif not isinstance(gate, ReplicatedLinear) or not isinstance(gate.quant_method, UnquantizedLinearMethod):
        reason = f"its router's logits come from a {type(gate).__name__} that is quantized, or of another kind"
    if reason:
        raise EngineError(
            f"{ROUTER_DTYPE}={FLOAT32} cannot be done in {runner.layer_name}: {reason}. Leave the routers in the "
            'model\'s dtype (router_dtype="model")'
        )
    gate.params_dtype, gate.router_replay_float32 = torch.float32, True
    for parameter in gate.parameters():
        parameter.data = parameter.data.float()
    # Not the forward of a subclass: GateLinear chooses kernels by the dtype that it was made with.
    gate.forward = functools.partial(_forward, functools.partial(ReplicatedLinear.forward, gate))


def _forward(original: Any, hidden_TH: torch.Tensor) -> Any:
    return original(hidden_TH.float())
