"""Sum the gradients of a Megatron-core model over the ranks that hold the same weights, and clip them by their norm.

Each rank has the gradient of its own tokens. An expert has the tokens of all ranks of its expert parallel group
already, so its gradient is summed over the ranks that hold the same expert; all other gradients are summed over the
data parallel ranks, and those of weights that see a part of the positions (sequence parallelism) also over the tensor
parallel ranks. The loss is a share of the mini-batch's, so sums are right, not means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from router_replay.rl.policy.megatron.weights import is_expert, is_replicated

BUCKET = 2**25  # numbers that one message sums


def sum_gradients(chunk: Any) -> None:
    """Replace the gradients of `chunk` by their sums over ranks. Parameters without a gradient get zeros.

    Without zeros the optimizer would skip the moments of an expert that got no token, which no other policy does.
    """
    groups = chunk.pg_collection
    whole: list[Tensor] = []
    experts: list[Tensor] = []
    partial: list[Tensor] = []
    for name, parameter in chunk.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        (experts if is_expert(name) else whole).append(parameter.grad)
        if is_replicated(name):
            partial.append(parameter.grad)
    _sum(partial, groups.tp)  # each rank computed its heads, or its positions
    _sum(whole, groups.dp_cp)
    _sum(experts, groups.expt_dp)


def drop_padding(chunk: Any, token: int | None) -> None:
    """Set the gradient of the embedding of `token`, the padding, to zero; None for a model without padding.

    transformers never trains this row. It is often all zero, and the norm behind it makes a huge gradient of a row of
    zeros, if a token of this number stands in a sequence.
    """
    if token is None or not chunk.pre_process:
        return
    weight = chunk.embedding.word_embeddings.weight
    row = token - chunk.pg_collection.tp.rank() * len(weight)
    if 0 <= row < len(weight):
        weight.grad[row] = 0.0


def gradient_norm(chunk: Any) -> Tensor:
    """Return the norm of the whole model's gradient, the same on all ranks.

    A weight that several ranks hold counts once: each of them adds its share.
    """
    groups = chunk.pg_collection
    squares = torch.zeros((), dtype=torch.float64, device=next(chunk.parameters()).device)
    for name, parameter in chunk.named_parameters():
        copies = groups.expt_dp.size() if is_expert(name) else groups.dp_cp.size()
        copies *= groups.tp.size() if is_replicated(name) else 1
        squares += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square() / copies
    dist.all_reduce(squares)
    return squares.sqrt()


def clip(chunk: Any, max_norm: float) -> Tensor:
    """Scale the gradients of `chunk` down to `max_norm`, and return the norm of the whole model's before that."""
    norm = gradient_norm(chunk).float()
    torch.nn.utils.clip_grads_with_norm_(chunk.parameters(), max_norm, norm)
    return norm


def _sum(gradients: Sequence[Tensor], group: Any) -> None:
    if group.size() == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(other.numel() for other in bucket) + gradient.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
