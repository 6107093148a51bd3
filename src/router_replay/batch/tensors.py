"""The torch edge of a batch: the same names as tensors, routes still one or two bytes per id."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from router_replay.batch.types import PER_SLOT, Batch
from router_replay.routes import Routes
from router_replay.spec import RouterSpec


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRoutes:
    """Routes on a device: `ids` [T, L, K] in the narrow dtype, `captured` [T] bool.

    `all_captured` is known on the host, so that nothing has to ask the device.
    """

    ids: torch.Tensor
    captured: torch.Tensor
    spec: RouterSpec
    all_captured: bool

    @classmethod
    def from_routes(cls, routes: Routes, device: Any = "cpu") -> TensorRoutes:
        ids = _writable(routes.ids).to(device, non_blocking=True)
        captured = _writable(routes.captured).to(device, non_blocking=True)
        return cls(ids, captured, routes.spec, routes.all_captured)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        return self.ids.device


@dataclasses.dataclass(frozen=True, eq=False)
class TensorBatch:
    """A Batch as tensors; see Batch for what each field means."""

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    labels: torch.Tensor
    label_mask: torch.Tensor
    label_logprobs: torch.Tensor
    label_advantages: torch.Tensor
    cu_seqlens: torch.Tensor
    routes: TensorRoutes | None
    max_seqlen: int

    @classmethod
    def from_batch(cls, batch: Batch, device: Any = "cpu") -> TensorBatch:
        fields = {name: _writable(getattr(batch, name)).to(device) for name in (*PER_SLOT, "cu_seqlens")}
        routes = None if batch.routes is None else TensorRoutes.from_routes(batch.routes, device)
        return cls(**fields, routes=routes, max_seqlen=batch.max_seqlen)

    def __len__(self) -> int:
        return len(self.token_ids)


def _writable(array: np.ndarray) -> torch.Tensor:
    """A tensor that owns its memory: torch would warn of, and then write through, a read-only array."""
    return torch.from_numpy(np.array(array))
