"""Tells vLLM 0.26 to 0.29 on a CPU which experts its kernel chose, for tests of what their servers answer.

Their CPU kernel chooses the experts itself (it is monolithic) and does not say which. vLLM 0.27 to 0.29 therefore
refuse to capture on a CPU, and 0.26 returns zeros. The option --worker-extension-cls makes every worker import this
module, which hands the kernel's own choice to vLLM's recorder. Everything after that is vLLM's: the recorder, the
scheduler, the messages and the HTTP answers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.v1.worker import gpu_model_runner

LAYERS = "vllm.model_executor.layers.fused_moe"
OLD, NEW = f"{LAYERS}.cpu_fused_moe", f"{LAYERS}.experts.cpu_moe"  # the kernel up to 0.27, and from 0.28 on
kernel: Any = importlib.import_module(OLD if importlib.util.find_spec(OLD) else NEW)
record: Callable[[Any], None] | None = None  # of the layer that computes now


class Capture:
    """Has no methods: importing this module is what matters."""


def bind(model: Any, capturer: Any) -> None:
    for module in model.modules():
        if isinstance(module, MoERunner):
            module._quant_method.record = functools.partial(capturer.capture, module.layer_id)


def apply_monolithic(self: Any, *arguments: Any, **more: Any) -> Any:
    global record
    record = getattr(self, "record", None)  # vLLM computes once before it binds, to measure memory
    return vllms_apply(self, *arguments, **more)


def select_experts(*arguments: Any, **more: Any) -> Any:
    weights, ids = vllms_selection(*arguments, **more)
    if record is not None:
        record(ids)
    return weights, ids


vllms_apply, UnquantizedFusedMoEMethod.apply_monolithic = UnquantizedFusedMoEMethod.apply_monolithic, apply_monolithic
vllms_selection, kernel.select_experts = kernel.select_experts, select_experts
if hasattr(gpu_model_runner, "bind_routed_experts_capturer"):  # from 0.28 on
    gpu_model_runner.bind_routed_experts_capturer = bind
else:
    gpu_model_runner.GPUModelRunner._bind_routed_experts_capturer = lambda self, capturer: bind(self.model, capturer)
