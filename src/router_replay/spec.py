"""RouterSpec: the number of experts, the top_k and the routed layers of one model."""

from __future__ import annotations

import dataclasses
import itertools
import math
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

    `num_experts` is the number of experts that a router chooses from, 1 to 65536; `top_k` is how many it chooses for
    each token. `layers` are absolute decoder layer ids, ascending. An id appears twice if a layer holds two
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
                raise SpecError(
                    f"num_layers must be greater than the last routed layer {self.layers[-1]}, got {self.num_layers}"
                )

    @classmethod
    def from_config(cls, config: Any) -> RouterSpec:
        """Make the spec from a transformers config, `config`: an object, or the dict of a `config.json`.

        This imports neither torch nor model code. Raises SpecError if the config does not describe its routers.
        """
        from router_replay.families.from_config import spec_from_config

        return spec_from_config(config)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of this model's ids; it depends on the number of experts, never on the values."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of one row: (number of routed layers, top_k)."""
        return (len(self.layers), self.top_k)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row in memory: 384 for 48 layers with 8 of 128 experts."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    @property
    def bound_bits(self) -> float:
        """The information of one row in bits: log2 of the number of its choices; 1,938 for 48 layers of 8 of 128."""
        choices = math.perm if self.ordered else math.comb
        return len(self.layers) * math.log2(choices(self.num_experts, self.top_k))

    @property
    def engine_layers(self) -> int:
        """The number of layer columns of an engine's array: num_layers, or if unknown the last routed layer + 1."""
        return self.num_layers if self.num_layers is not None else self.layers[-1] + 1

    def select(self, layers: Iterable[int]) -> RouterSpec:
        """Return the spec of a subset of these layers, such as those of a pipeline stage.

        `layers` are absolute ids in ascending order. Raises SpecError for a layer that is not in this spec.
        """
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
        raise SpecError(f"layers must be absolute decoder layer ids of 0 or more, in ascending order, got {ids}")
    return ids
