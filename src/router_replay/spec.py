"""RouterSpec: the number of experts, the top_k and the routed layers of one model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from router_replay.arguments import exact_int
from router_replay.errors import SpecError

MAX_EXPERTS = 1 << 16  # ids are stored in at most two bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RouterSpec:
    """Describes the routers of a model: the number of experts, how many are chosen, and the routed layers.

    A model of four decoder layers whose first is dense, with 8 experts of which 2 are used:

        RouterSpec(num_experts=8, top_k=2, layers=(1, 2, 3))

    `layers` are absolute decoder layer ids, ascending. An id appears twice if a layer holds two
    routers. `ordered` says that the order of the slots in a row has a meaning (phimoe, nllb_moe).
    `num_layers`, where known, is the number of decoder layers, dense ones included; it gives the width of
    an engine's array over all layers and is ignored by equality. Invalid values raise SpecError.
    """

    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    ordered: bool = False
    num_layers: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        experts = exact_int(self.num_experts, "num_experts", SpecError, 1, MAX_EXPERTS)
        object.__setattr__(self, "num_experts", experts)
        top_k = exact_int(self.top_k, "top_k", SpecError)
        if not 1 <= top_k <= experts:
            raise SpecError(f"top_k must be between 1 and num_experts={experts}, got {top_k}")
        object.__setattr__(self, "top_k", top_k)
        object.__setattr__(self, "layers", _layer_ids(self.layers))
        if not isinstance(self.ordered, bool | np.bool_):
            raise SpecError(f"ordered must be True or False, got {self.ordered!r}")
        object.__setattr__(self, "ordered", bool(self.ordered))
        if self.num_layers is not None:
            object.__setattr__(self, "num_layers", exact_int(self.num_layers, "num_layers", SpecError, 1))
            if self.num_layers <= self.layers[-1]:
                raise SpecError(f"num_layers={self.num_layers} does not reach the last routed layer {self.layers[-1]}")

    @classmethod
    def from_config(cls, config: Any) -> RouterSpec:
        """Make the spec from a transformers config (object or dict). This imports neither torch nor model code."""
        from router_replay.families.from_config import spec_from_config

        return spec_from_config(config)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of this model's ids; it depends on the number of experts, never on the values."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_shape(self) -> tuple[int, int]:
        return (len(self.layers), self.top_k)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row in memory: 384 for 48 layers with 8 of 128 experts."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    @property
    def engine_layers(self) -> int:
        """The number of layer columns of an array over all decoder layers, as far as it is known."""
        return self.num_layers if self.num_layers is not None else self.layers[-1] + 1

    def select(self, layers: Iterable[int]) -> RouterSpec:
        """Return the spec of a subset of these layers, such as those of a pipeline stage."""
        wanted = _layer_ids(tuple(layers))
        missing = sorted(set(wanted) - set(self.layers))
        if missing:
            raise SpecError(f"layers {missing} have no router in this spec; its routed layers are {self.layers}")
        kept = tuple(layer for layer in self.layers if layer in set(wanted))
        return dataclasses.replace(self, layers=kept)


def _layer_ids(layers: Any) -> tuple[int, ...]:
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise SpecError(f"layers must be a sequence of decoder layer ids, got {layers!r}")
    ids = tuple(exact_int(layer, "a layer id", SpecError, least=-1) for layer in layers)
    if not ids:
        raise SpecError("layers is empty: a spec needs at least one routed layer")
    if ids[0] < 0 or any(b < a for a, b in itertools.pairwise(ids)):
        raise SpecError(f"layers must be ascending absolute decoder layer ids from 0 on, got {ids}")
    return ids
