"""The two collectives that data parallelism needs and that vLLM's CPU build does not have.

`VllmEngine(..., worker_extension_cls="tests.engines.vllm.cpu_collectives.Collectives")` makes every worker import this
module. Without it, a MoE model on two data-parallel ranks ends with NotImplementedError on a CPU (vLLM 0.30 and 0.32).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Collectives:
    """Has no methods: importing this module is what matters."""


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))  # gloo gathers equal sizes only
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
