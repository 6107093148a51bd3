"""Say where the weights of a Megatron-core model stand in the Hugging Face layout, and carry them in both directions.

A parameter on a rank is made of parts. Each part is a rectangle of the parameter, and a rectangle of a Hugging Face
tensor: the query rows of one head group, the gate half of an expert, this rank's columns of a projection. Weights,
gradients and the optimizer's moments have the same parts.

    for name, parameter in chunk.named_parameters():
        for part in parts_of(chunk, name):
            parameter[part.here].copy_(tensors[part.name][part.whole])

The names are those of transformers' state dict, in which all experts of a layer are one tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from router_replay.errors import TrainError
from router_replay.rl.weights.held import counted


class WeightsError(TrainError):
    """Weights do not fit: a tensor is missing, has another shape, or has no known place."""


EXPERT = "mlp.experts.local_experts."
FINAL_NORM = "decoder.final_layernorm.weight"
REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A rectangle of a parameter (`here`), and the same numbers in the Hugging Face tensor `name` (`whole`)."""

    name: str
    here: tuple[slice, ...]
    whole: tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """This rank's place in a tensor parallel group: number `rank` of `size`."""

    rank: int
    size: int

    @classmethod
    def in_group(cls, group: Any) -> Shard:
        """Return this rank's place in a process group."""
        return cls(group.rank(), group.size())

    def of(self, length: int) -> slice:
        """Return this rank's equal share of `length` rows or columns."""
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def is_expert(name: str) -> bool:
    """Return whether the parameter `name` of a chunk belongs to an expert."""
    return EXPERT in name


def is_replicated(name: str) -> bool:
    """Return whether each rank of the tensor parallel group holds the whole of the parameter `name`.

    Experts are not: they are divided by groups of their own.
    """
    return name == FINAL_NORM or any(name.endswith(f".{one}") for one in REPLICATED)


def parts_of(chunk: Any, name: str) -> list[Part]:
    """Return the parts of the parameter `name` of `chunk`, a GPTModel.

    Raise WeightsError for a parameter whose place in the Hugging Face layout is not known.
    """
    shape = chunk.get_parameter(name).shape
    shard = Shard.in_group(chunk.pg_collection.tp)
    every = (slice(None),) * len(shape)
    outside = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    if name in outside:
        return [Part(outside[name], every, (shard.of(shape[0] * shard.size),))]
    if name == FINAL_NORM:
        return [Part("model.norm.weight", every, every)]
    _, _, index, inside = name.split(".", 3)
    layer = chunk.decoder.layers[int(index)]
    prefix = f"model.layers.{layer.layer_number - 1}."
    if inside in REPLICATED:
        return [Part(prefix + REPLICATED[inside], every, every)]
    if inside == "self_attention.linear_qkv.weight":
        return _of_attention(chunk.config, shard, prefix)
    if inside == "self_attention.linear_proj.weight":
        return [Part(prefix + "self_attn.o_proj.weight", every, (slice(None), shard.of(shape[1] * shard.size)))]
    if inside.startswith(EXPERT):
        number, matrix = inside.removeprefix(EXPERT).split(".")[:2]
        expert = layer.mlp.local_expert_indices[int(number)]
        return _of_expert(shape, chunk.pg_collection.expt_tp, f"{prefix}mlp.experts.", expert, matrix)
    block, _, matrix = inside.removesuffix(".weight").rpartition(".")
    if block in ("mlp", "mlp.shared_experts") and matrix == "linear_fc2":
        return [Part(f"{prefix}{block}.down_proj.weight", every, (slice(None), shard.of(shape[1] * shard.size)))]
    if block in ("mlp", "mlp.shared_experts") and matrix == "linear_fc1":
        half = shape[0] // 2
        return [
            Part(f"{prefix}{block}.{one}_proj.weight", (rows,), (shard.of(half * shard.size),))
            for one, rows in (("gate", slice(0, half)), ("up", slice(half, 2 * half)))
        ]
    raise WeightsError(f"the parameter {name} of the Megatron model has no known place in the Hugging Face layout")


def _of_attention(config: Any, shard: Shard, prefix: str) -> list[Part]:
    """Return the parts of the fused projection: for each head group its queries, then its key, then its value."""
    width = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups
    groups = shard.of(config.num_query_groups)
    parts = []
    start = 0
    for group in range(groups.start, groups.stop):
        for one, heads in (("q", queries), ("k", 1), ("v", 1)):
            rows = heads * width
            whole = slice(group * rows, (group + 1) * rows)
            parts.append(Part(f"{prefix}self_attn.{one}_proj.weight", (slice(start, start + rows),), (whole,)))
            start += rows
    return parts


def _of_expert(shape: torch.Size, group: Any, prefix: str, expert: int, matrix: str) -> list[Part]:
    """Return the parts of a matrix of an expert, which the ranks of the expert tensor parallel `group` divide."""
    shard = Shard.in_group(group)
    if matrix == "linear_fc2":
        return [Part(f"{prefix}down_proj", (slice(None),) * 2, (expert, slice(None), shard.of(shape[1] * shard.size)))]
    half = shape[0] // 2
    own = shard.of(half * shard.size)
    return [
        Part(f"{prefix}gate_up_proj", (here,), (expert, slice(own.start + above, own.stop + above)))
        for here, above in ((slice(0, half), 0), (slice(half, 2 * half), half * shard.size))
    ]


# -- Hugging Face to Megatron -----------------------------------------------------------------------------------------


@torch.no_grad()
def load(chunk: Any, tensors: Mapping[str, Any]) -> None:
    """Copy this rank's part of the Hugging Face `tensors` into the parameters of `chunk`."""
    for name, parameter in chunk.named_parameters():
        fill(parameter, parts_of(chunk, name), tensors)


def fill(target: Tensor, parts: Sequence[Part], tensors: Mapping[str, Any]) -> None:
    """Copy the rectangles of the Hugging Face `tensors` that `parts` name into `target`.

    Raise WeightsError if a tensor is missing or has another shape.
    """
    for part in parts:
        if part.name not in tensors:
            raise WeightsError(f"the Hugging Face weights lack {part.name}, which the Megatron model needs")
        given, place = tensors[part.name][part.whole], target[part.here]
        if given.shape != place.shape:
            raise WeightsError(
                f"{part.name}: the Megatron model needs {list(place.shape)} at {part.whole}, got {list(given.shape)}"
            )
        place.copy_(given)


# -- Megatron to Hugging Face -----------------------------------------------------------------------------------------


class Collector:
    """Collects whole Hugging Face tensors on the first rank, one at a time. All ranks must make and call it together.

    `chunk` is this rank's part of the model, `shapes` are those of the Hugging Face tensors, and `rank` is this process
    out of `world`. Ranks that hold the same parameters send them once. Raises WeightsError if no rank holds a tensor.
    """

    def __init__(self, chunk: Any, shapes: Mapping[str, torch.Size], rank: int, world: int) -> None:
        mine = {name: parts_of(chunk, name) for name, _ in chunk.named_parameters()}
        everyone: list[Any] = [mine]  # the parameters of every rank, and the parts of each
        if world > 1:
            everyone = [None] * world
            dist.all_gather_object(everyone, mine)
        # For each Hugging Face tensor, by rank: the parameter and the part of it that the rank sends.
        self._sent: dict[str, list[list[tuple[str, Part]]]] = {name: [[] for _ in range(world)] for name in shapes}
        for sender, names in enumerate(_one_sender_each(everyone)):
            for name in names:
                for part in everyone[sender][name]:
                    self._sent[part.name][sender].append((name, part))
        if absent := sorted(name for name, senders in self._sent.items() if not any(senders)):
            raise WeightsError(f"no rank holds {len(absent)} of the Hugging Face weights, such as {absent[0]}")
        self._shapes, self._rank = dict(shapes), rank

    @torch.no_grad()
    def collect(self, name: str, values: Mapping[str, Tensor]) -> Tensor | None:
        """Return the whole Hugging Face tensor `name` on the first rank's CPU, and None elsewhere.

        `values` has a float32 tensor for every parameter of the chunk, by its name: the parameter itself, or a moment
        of the optimizer.
        """
        if self._rank:
            if mine := self._sent[name][self._rank]:
                flat = torch.cat([values[own][part.here].reshape(-1) for own, part in mine])
                dist.send(counted(flat.cpu()), dst=0)
            return None
        found = counted(torch.empty(self._shapes[name]))
        for other, parts in enumerate(self._sent[name]):
            places = [found[part.whole] for _, part in parts]
            if other == 0:
                given = [values[own][part.here] for own, part in parts]
            elif parts:
                flat = counted(torch.empty(sum(place.numel() for place in places)))
                dist.recv(flat, src=other)
                given = list(flat.split([place.numel() for place in places]))
            else:
                continue
            for place, tensor in zip(places, given, strict=True):
                place.copy_(tensor.view(place.shape))
        return found


def _one_sender_each(everyone: Sequence[Mapping[str, list[Part]]]) -> list[list[str]]:
    """Return the parameters that each rank sends: those that no rank before it holds."""
    seen: set[str] = set()
    senders = []
    for held in everyone:
        own = [name for name, parts in held.items() if repr(parts) not in seen]
        seen |= {repr(held[name]) for name in own}
        senders.append(own)
    return senders
