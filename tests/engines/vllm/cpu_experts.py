"""What expert parallelism needs and vLLM's CPU build does not have: a kernel that knows which experts a rank holds.

`VllmEngine(..., worker_extension_cls="tests.engines.vllm.cpu_experts.Experts")` makes every worker import this module.
Without it, the kernel ignores the map of experts, reads weights that the rank does not hold, and ends the worker with a
segmentation fault (vLLM 0.30).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tests.engines.vllm.cpu_collectives import Collectives


class Experts(Collectives):
    """Has no methods: importing this module is what matters. Data-parallel ranks need the collectives, too."""


def apply(
    self: Any, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, **rest: Any
) -> None:
    """Give experts of other ranks the weight 0; vLLM adds the outputs of all ranks."""
    if expert_map is not None:
        local = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local < 0, 0)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype)
    original(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **rest)


original = CPUUnquantizedExperts.apply
CPUUnquantizedExperts.apply = apply
