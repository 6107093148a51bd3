"""Ulysses implements sequence parallelism: each rank holds a piece of the sequence, attention sees all of it.

Around attention, an all-to-all exchanges the split over the sequence for a split over heads: [H, T / P] becomes
[H / P, T] and back. The function is registered through transformers' attention interface; its state is passed with
the call, as the `ulysses` argument of the model's forward.

    ulysses = Ulysses(model, group)
    local = batch.shard(rank, size).to_torch()
    with replayer.replay(local.routes):
        out = logprobs(model, local, **ulysses.arguments(batch))

Shapes: H heads, T tokens of the whole bin, P ranks, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from router_replay.batch import Batch
from router_replay.batch.tensors import TensorBatch
from router_replay.errors import ReplayError
from router_replay.forward.inner import inner_model
from router_replay.forward.packing import why_not_packed

NAME = "router_replay_ulysses"


class _Call:
    """Holds the state of one forward pass: the group, the sequence boundaries, and the number of attention calls.

    It is not a dataclass: FSDP2 copies dataclasses among a forward's arguments, and the copy would be counted up.
    """

    def __init__(self, group: Any, boundaries: list[int]) -> None:
        self.group = group
        self.boundaries = boundaries
        self.attention_calls = 0


class Ulysses:
    """Makes the attention of `model` sequence parallel over the process group `group` (default: all ranks).

    Raises ReplayError for a model on which that would be silently wrong, and if its heads do not divide over the ranks.
    """

    def __init__(self, model: Any, group: Any = None) -> None:
        from transformers import AttentionInterface

        self.group = group
        self.size = dist.get_world_size(group)
        inner = inner_model(model)
        reason = why_not_packed(model)
        if reason:
            raise ReplayError(
                f"{type(inner).__name__} cannot be sequence parallel ({reason}): with the sequence cut into pieces its "
                "results would be wrong"
            )
        config = inner.config.get_text_config()
        if config.num_attention_heads % self.size:
            raise ReplayError(
                f"the number of attention heads must be a multiple of the {self.size} ranks, "
                f"got {config.num_attention_heads}"
            )
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ReplayError(
                f"layers of kind {sorted(kinds)} do not use the attention that Ulysses makes sequence parallel: with "
                "the sequence cut into pieces their results would be wrong"
            )
        self._layers = config.num_hidden_layers
        AttentionInterface.register(NAME, ulysses_attention)
        inner.set_attn_implementation(NAME)

    def arguments(self, batch: Batch | TensorBatch) -> dict[str, Any]:
        """Return the arguments for the model's forward besides this rank's tokens.

        `batch` is the whole batch or a shard. Raises ReplayError if it has several bins.
        """
        if isinstance(batch, Batch) and batch.num_bins != 1:
            raise ReplayError(
                f"sequence parallelism needs a batch of one bin, got {batch.num_bins} bins: use batch.bins()"
            )
        return {"ulysses": _Call(self.group, batch.cu_seqlens.tolist())}

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise ReplayError if a layer of the finished forward did not use the sequence-parallel attention.

        `arguments` are those that the forward was given.
        """
        calls = arguments["ulysses"].attention_calls
        if calls < self._layers:
            raise ReplayError(
                f"all {self._layers} layers must use the sequence-parallel attention, got {calls} calls of it: the "
                "other layers attended to one piece of the sequence only"
            )


class _AllToAll(torch.autograd.Function):
    """Runs all_to_all_single along dimension 0; its gradient is the same operation."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, tensor.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def heads_for_sequence(tensor_HtD: torch.Tensor, group: Any) -> torch.Tensor:
    """Convert [H, T / P, D] on each rank to [H / P, T, D]."""
    ranks = dist.get_world_size(group)
    heads, length, size = tensor_HtD.shape
    traded = _AllToAll.apply(tensor_HtD.reshape(ranks, heads // ranks, length, size), group)
    return traded.transpose(0, 1).reshape(heads // ranks, ranks * length, size)


def sequence_for_heads(tensor_hTD: torch.Tensor, group: Any) -> torch.Tensor:
    """Convert [H / P, T, D] on each rank to [H, T / P, D]."""
    ranks = dist.get_world_size(group)
    heads, length, size = tensor_hTD.shape
    pieces = tensor_hTD.reshape(heads, ranks, length // ranks, size).transpose(0, 1)
    return _AllToAll.apply(pieces, group).reshape(heads * ranks, length // ranks, size)


def ulysses_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    ulysses: _Call | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sequence of the bin; tensors are [1, H, T / P, D].

    Raises ReplayError without `ulysses`, or with a mask, a soft cap, dropout or more than one bin.
    """
    if ulysses is None:
        raise ReplayError("this model's attention is sequence parallel: call the model with **ulysses.arguments(batch)")
    if attention_mask is not None or softcap is not None or dropout or len(query) != 1:
        raise ReplayError(
            "sequence-parallel attention takes one packed bin, no mask, no soft cap and no dropout, got "
            f"{len(query)} bins, {'no' if attention_mask is None else 'a'} mask, softcap={softcap}, dropout={dropout}"
        )
    ulysses.attention_calls += 1
    ranks, rank = dist.get_world_size(ulysses.group), dist.get_rank(ulysses.group)
    if key.shape[1] % ranks:  # fewer key heads than ranks: each rank needs its own copy
        key, value = (part.repeat_interleave(ranks // key.shape[1], dim=1) for part in (key, value))
    query_hTD, key_gTD, value_gTD = (heads_for_sequence(part[0], ulysses.group) for part in (query, key, value))
    groups = len(query_hTD) // len(key_gTD)
    key_hTD, value_hTD = (part.repeat_interleave(groups, dim=0) for part in (key_gTD, value_gTD))
    sinks = None if s_aux is None else s_aux.chunk(ranks)[rank]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    pieces = [
        _one_sequence(query_hTD[:, a:b], key_hTD[:, a:b], value_hTD[:, a:b], scale, sliding_window, sinks)
        for a, b in zip(ulysses.boundaries, ulysses.boundaries[1:], strict=False)
    ]
    out_HtD = sequence_for_heads(torch.cat(pieces, dim=1), ulysses.group)
    return out_HtD.transpose(0, 1)[None], None


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    length = query.shape[1]
    mask = None
    if sinks is not None or (window is not None and window < length):
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (distance >= 0) & (distance < (window or length))
    if sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    # An attention sink is one more logit per head that takes weight and gives no value (gpt-oss).
    assert mask is not None
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1).to(scores.dtype)], dim=-1)
    return (scores.float().softmax(-1)[..., :-1]).to(value.dtype) @ value
