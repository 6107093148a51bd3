"""Batches and routes as tensors. Field names stay the same, and an expert id still takes one or two bytes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from router_replay.batch.local import LocalBatch
from router_replay.batch.types import PER_SLOT, Batch
from router_replay.errors import RoutesError
from router_replay.route_source import RouteSource
from router_replay.spec import RouterSpec


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRoutes:
    """Routes on a device: `ids` [T, L, K] in the narrow dtype, `captured` [T] bool.

    `all_captured` and `any_captured` are stored on the host, so that a replay never waits for the device. If
    `any_captured` is not given, it is read from the device once, at construction. `completed` says that rows which are
    not captured hold experts too: those that an earlier pass chose for them.
    """

    ids: torch.Tensor
    captured: torch.Tensor
    spec: RouterSpec
    all_captured: bool
    any_captured: bool | None = None
    completed: bool = False

    def __post_init__(self) -> None:
        rows, columns = len(self.ids), (len(self.spec.layers), self.spec.top_k)
        if self.ids.shape != (rows, *columns):
            raise RoutesError(
                f"ids must have the shape [rows, {columns[0]} layers, {columns[1]} slots], got {list(self.ids.shape)}"
            )
        if self.captured.shape != (rows,) or self.captured.dtype != torch.bool:
            raise RoutesError(
                f"captured must be [{rows}] of torch.bool, one per row of ids, got {list(self.captured.shape)} of "
                f"{self.captured.dtype}"
            )
        if self.any_captured is None:
            known = self.all_captured or not rows
            object.__setattr__(self, "any_captured", rows > 0 if known else bool(self.captured.any()))

    @classmethod
    def from_routes(cls, routes: RouteSource, device: Any = "cpu") -> TensorRoutes:
        """Read the routes, and copy them to a device."""
        routes = routes.read()
        ids, captured = on_device(routes.ids, device), on_device(routes.captured, device)
        return cls(ids, captured, routes.spec, routes.all_captured, routes.any_captured)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        """The device of the ids."""
        return self.ids.device


@dataclasses.dataclass(frozen=True, eq=False)
class TensorBatch:
    """A Batch as tensors; see Batch for what each field means.

    `boundaries` are the numbers of `cu_seqlens` on the host, so that a pass never waits for the device. If they are not
    given, they are read from the device once, at construction.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    labels: torch.Tensor
    label_mask: torch.Tensor
    label_logprobs: torch.Tensor
    label_advantages: torch.Tensor
    label_versions: torch.Tensor
    cu_seqlens: torch.Tensor
    routes: TensorRoutes | None
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.boundaries:
            object.__setattr__(self, "boundaries", tuple(self.cu_seqlens.tolist()))

    @classmethod
    def from_batch(cls, batch: Batch, device: Any = "cpu") -> TensorBatch:
        """Copy a batch to a device."""
        fields = {name: on_device(getattr(batch, name), device) for name in (*PER_SLOT, "cu_seqlens")}
        routes = None if batch.routes is None else TensorRoutes.from_routes(batch.routes, device)
        return cls(**fields, routes=routes, boundaries=tuple(batch.cu_seqlens.tolist()))

    def __len__(self) -> int:
        return len(self.token_ids)


class LocalTensors:
    """A LocalBatch on a device. An array is copied there on its first use, and then kept.

    `token_ids`, `position_ids`, `labels`, `label_mask` and `routes` cover this rank's slots; `whole(name)` returns an
    array over all slots of the bin.
    """

    def __init__(self, local: LocalBatch, device: torch.device) -> None:
        self.device = device
        # Not `local` itself, which keeps this object: memory in a cycle is freed late, and so are rows in a store.
        self._batch, self._place, self._rows, self._slots = local.whole, local.place, local.routes, len(local)
        self._whole: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._slots

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The sequence borders of the whole bin, on the host."""
        return tuple(self._batch.cu_seqlens.tolist())

    def whole(self, name: str) -> torch.Tensor:
        """Return the array `name` of the Batch, over all slots of the bin."""
        if name not in self._whole:
            self._whole[name] = on_device(getattr(self._batch, name), self.device)
        return self._whole[name]

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens of this rank's slots."""
        return self._mine("token_ids")

    @property
    def position_ids(self) -> torch.Tensor:
        """The position of each of this rank's slots in its sequence."""
        return self._mine("position_ids")

    @property
    def labels(self) -> torch.Tensor:
        """The token that each of this rank's slots predicts; NO_LABEL for none."""
        return self._mine("labels")

    @property
    def label_mask(self) -> torch.Tensor:
        """True for each of this rank's slots whose label is part of the loss."""
        return self._mine("label_mask")

    @functools.cached_property
    def routes(self) -> TensorRoutes | None:
        """The rows of this rank's slots, or None if the batch has no routes."""
        return None if self._rows is None else TensorRoutes.from_routes(self._rows, self.device)

    def complete(self, ids: torch.Tensor) -> None:
        """Keep `ids` [T, L, K], the experts that a pass with these routes used: the captured ones and its own choice.

        Later passes then use this choice for the missing rows instead of choosing again.
        """
        if self.routes is not None:
            self.routes = dataclasses.replace(self.routes, ids=ids, completed=True)

    def _mine(self, name: str) -> torch.Tensor:
        place = self._place
        return self.whole(name)[place if isinstance(place, slice) else on_device(place, self.device)]


def torch_device(device: Any) -> torch.device:
    """Return the device with its index: "cuda" means the current one."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def on_device(array: np.ndarray, device: Any) -> torch.Tensor:
    """Copy `array` into a tensor on `device` that owns its memory.

    Over a read-only array torch warns, and could then write to it. A GPU copies from pinned memory in the background;
    from other memory the caller would wait for it.
    """
    if torch.device(device).type != "cuda":
        return torch.from_numpy(np.array(array)).to(device)
    pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)
