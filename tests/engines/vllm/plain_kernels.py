"""Kernels for CPUs that compute with the weights as they are, as those of GPUs do: vLLM's own pack them first.

`VllmEngine(..., worker_extension_cls="tests.engines.vllm.plain_kernels.Plain")` makes every worker import this module.
Then qkv_proj, w13_weight and all other parameters have the layout in which vLLM's loaders fill them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tests.engines.vllm.cpu_collectives import Collectives


class Plain(Collectives):
    """Has no methods: importing this module is what matters."""


def apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Compute each expert by two products. Experts of other ranks have no part; vLLM adds the outputs of all ranks."""
    local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    result = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        token, slot = (local == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[token] @ w1[expert].T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        result.index_add_(0, token, out.float() * topk_weights[token, slot, None].float())
    output.copy_(result)


def no_packing(self: Any, layer: Any) -> None:
    """Leave the weights as they were loaded."""


ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False
CPUUnquantizedExperts.process_weights_after_loading = no_packing
CPUUnquantizedExperts.apply = apply
