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

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from router_replay.batch import Batch
from router_replay.batch.tensors import TensorBatch
from router_replay.errors import ReplayError
from router_replay.families.from_modules import device_of
from router_replay.families.types import NOT_TRIED
from router_replay.forward.attention import why_masked
from router_replay.forward.inner import inner_model
from router_replay.forward.kernels import Sequences, attention, checked_kernel
from router_replay.forward.packing import why_not_packed

NAME = "router_replay_ulysses"


class _Call(Sequences):
    """Holds the state of one forward pass: the sequences, the group that shares them, and the kernel to use."""

    def __init__(self, boundaries: Sequence[int], device: torch.device, group: Any, kernel: str) -> None:
        super().__init__(boundaries, device)
        self.group = group
        self.kernel = kernel


class Ulysses:
    """Makes the attention of `model` sequence parallel over the process group `group` (default: all ranks).

    `kernel` computes the attention of a rank's heads: "varlen", "flash", "segments", or "auto" for the fastest that is
    possible (see router_replay.forward.kernels).

    Raises ReplayError for a model on which that would be silently wrong, and if its heads do not divide over the ranks.
    """

    def __init__(self, model: Any, group: Any = None, kernel: str = "auto") -> None:
        from transformers import AttentionInterface

        self.group = group
        self.kernel = checked_kernel(kernel)
        self.size = dist.get_world_size(group)
        inner = inner_model(model)
        reason = why_not_packed(model) or why_masked(model)
        if reason and reason != NOT_TRIED:
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
        self._layers, self._model = config.num_hidden_layers, inner
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
        boundaries = batch.boundaries if isinstance(batch, TensorBatch) else batch.cu_seqlens.tolist()
        device = device_of(self._model) or torch.device("cpu")
        return {"ulysses": _Call(boundaries, device, self.group, self.kernel)}

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

    Raises ReplayError without `ulysses`, or with a mask, dropout or more than one bin.
    """
    if ulysses is None:
        raise ReplayError("this model's attention is sequence parallel: call the model with **ulysses.arguments(batch)")
    if attention_mask is not None or dropout or len(query) != 1:
        raise ReplayError(
            "sequence-parallel attention takes one packed bin, no mask and no dropout, got "
            f"{len(query)} bins, {'no' if attention_mask is None else 'a'} mask, dropout={dropout}"
        )
    ulysses.attention_calls += 1
    ranks, rank = dist.get_world_size(ulysses.group), dist.get_rank(ulysses.group)
    if key.shape[1] % ranks:  # fewer key heads than ranks: each rank needs its own copy
        key, value = (part.repeat_interleave(ranks // key.shape[1], dim=1) for part in (key, value))
    query_hTD, key_gTD, value_gTD = (heads_for_sequence(part[0], ulysses.group) for part in (query, key, value))
    out_1ThD = attention(
        query_hTD[None],
        key_gTD[None],
        value_gTD[None],
        ulysses,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.chunk(ranks)[rank],
        wanted=ulysses.kernel,
    )
    out_HtD = sequence_for_heads(out_1ThD[0].transpose(0, 1), ulysses.group)
    return out_HtD.transpose(0, 1)[None], None
