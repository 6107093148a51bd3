"""Run the experts of a layer as grouped matrix products whose backward pass only gathers.

transformers' "grouped_mm" sorts the (token, slot) pairs by expert with plain indexing. The gradient of an index is
`index_put` with accumulation, which sorts the indices again and adds row by row, three times per layer. But the pairs
are only permuted, and the gradient of a permutation is the inverse permutation. The forward pass computes the same
bits as "grouped_mm".

    use_gathering_experts(model)

Shapes: T tokens, K slots, S = T * K pairs, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

NAME = "router_replay_grouped_mm"


def use_gathering_experts(model: Any) -> bool:
    """Let the experts of the transformers model `model` gather, and return whether they do.

    A model whose experts do not run as "grouped_mm" is left as it is.
    """
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        return False
    moe.ExpertsInterface.register(NAME, gathering_experts)
    model.set_experts_implementation(NAME)
    return True


def gathering_experts(self: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [T, H]; `self` is the experts module of transformers.

    `experts_TK` are the chosen experts, `weights_TK` their gate weights. Experts with a bias and expert parallel
    models run in transformers' own function.
    """
    if self.has_bias or getattr(self, "_is_expert_parallel", False):
        return moe.grouped_mm_experts_forward(self, hidden_TH, experts_TK, weights_TK)
    sorted_S, order_S = torch.sort(experts_TK.reshape(-1))
    numbers_S = torch.arange(len(order_S), device=order_S.device)
    place_S = torch.empty_like(order_S).scatter_(0, order_S, numbers_S)  # where each pair lies in the sorted order
    counted = sorted_S.int() if sorted_S.is_cuda else sorted_S.float()  # histc takes no integers on a CPU
    rows_E = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends_E = torch.cumsum(rows_E, dim=0, dtype=torch.int32)
    given_SH = _ToExperts.apply(hidden_TH, order_S, place_S, experts_TK.shape[-1])
    up = self.gate_up_proj if self.has_gate else self.up_proj
    inside = moe._grouped_linear(given_SH, up, ends_E, is_transposed=self.is_transposed)
    inside = self._apply_gate(inside) if self.has_gate else self.act_fn(inside)
    out_SH = moe._grouped_linear(inside, self.down_proj, ends_E, is_transposed=self.is_transposed)
    return _FromExperts.apply(out_SH, weights_TK, order_S, place_S).to(hidden_TH.dtype)


class _ToExperts(torch.autograd.Function):
    """Gives each expert the hidden states of its pairs, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, order_S: Tensor, place_S: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(place_S)
        ctx.slots = slots
        return hidden_TH.index_select(0, order_S // slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_S,) = ctx.saved_tensors
        return _sum_of_pairs(grads[0], place_S.view(-1, ctx.slots)), None, None, None


class _FromExperts(torch.autograd.Function):
    """Adds up the outputs of each token's experts, times their gate weights."""

    @staticmethod
    def forward(ctx: Any, out_SH: Tensor, weights_TK: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
        ctx.save_for_backward(out_SH, weights_TK, order_S, place_S)
        out_TKH = out_SH.index_select(0, place_S).view(*weights_TK.shape, out_SH.shape[-1])
        return _times(out_TKH, weights_TK.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out_SH, weights_TK, order_S, place_S = ctx.saved_tensors
        grad_SH = grads[0].index_select(0, order_S // weights_TK.shape[-1])
        grad_weights_S = _dots(grad_SH, out_SH).index_select(0, place_S)
        weights_S1 = weights_TK.reshape(-1).index_select(0, order_S).unsqueeze(-1)
        grad_out_SH = _times(grad_SH, weights_S1).to(out_SH.dtype)
        return grad_out_SH, grad_weights_S.view(weights_TK.shape).to(weights_TK.dtype), None, None


# The pairs of all tokens are the largest tensors of a layer. On a CPU most of the time goes into allocating and
# writing them, so nothing of that size is written that need not be.


def _times(own: Tensor, factors: Tensor) -> Tensor:
    """Return `own` times `factors`; `own` belongs to the caller and is overwritten where the product has its dtype."""
    return own.mul_(factors) if own.dtype == factors.dtype else own * factors


def _dots(left_SH: Tensor, right_SH: Tensor) -> Tensor:
    """Return the dot product of each pair of rows, [S]."""
    if left_SH.is_cuda or left_SH.dtype != right_SH.dtype:
        return (left_SH * right_SH).sum(-1)
    return torch.bmm(left_SH.unsqueeze(1), right_SH.unsqueeze(2)).view(-1)


def _sum_of_pairs(rows_SH: Tensor, place_TK: Tensor) -> Tensor:
    """Return for each token the sum of the rows at its places, [T, H]."""
    if rows_SH.is_cuda:
        return rows_SH.index_select(0, place_TK.reshape(-1)).view(*place_TK.shape, -1).sum(1)
    return torch.nn.functional.embedding_bag(place_TK, rows_SH.contiguous(), mode="sum")
