"""Compute log-probs of given tokens from hidden states, one piece of the vocabulary at a time.

The full logits of a long batch are never stored: forward keeps a running log-sum-exp over pieces of
the vocabulary, backward computes each piece again. A piece of P entries exists once in the dtype of the model and once
in float32, and what follows is computed in place: on a GPU these [T, P] tensors can be the peak of a pass. Only a scale
or a soft cap of the logits makes more of them. Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class LogitRule:
    """Describes how a model transforms the output of its output matrix, bias included: a scale, then a soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the transformed logits, in float32. They are `logits` itself if nothing is to be done."""
        logits = logits.float()
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def slope(self, capped: torch.Tensor) -> torch.Tensor | float:
        """Return d(rule(x)) / dx, given `capped`, the result of `apply`."""
        return self.scale if self.softcap is None else self.scale * (1 - (capped / self.softcap) ** 2)


class TokenLogprobs(torch.autograd.Function):
    """Computes log softmax(rule(hidden @ weight.T + bias) / temperature)[labels], without the [T, V] logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        rule: LogitRule,
        temperature: float,
        piece: int,
    ) -> torch.Tensor:
        """Return the log-prob of each label [T], float32; `piece` vocabulary entries have logits at one time."""
        tokens = len(hidden_TH)
        lse_T = hidden_TH.new_full((tokens,), -torch.inf, dtype=torch.float32)
        chosen_T = hidden_TH.new_zeros((tokens,), dtype=torch.float32)
        for start in range(0, len(weight_VH), piece):
            logits_TP = _piece_of_logits(hidden_TH, weight_VH, bias_V, rule, start, piece)
            _divide(logits_TP, temperature)
            inside_T, local_T = _inside(labels_T, start, logits_TP.shape[-1])
            chosen_T = torch.where(inside_T, logits_TP.gather(-1, local_T[:, None])[:, 0], chosen_T)
            lse_T = torch.logaddexp(lse_T, _logsumexp(logits_TP))
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, labels_T, lse_T)
        ctx.rule, ctx.temperature, ctx.piece = rule, temperature, piece
        return chosen_T - lse_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias; each piece of the logits is computed again."""
        hidden_TH, weight_VH, bias_V, labels_T, lse_T = ctx.saved_tensors
        grad_T = grads[0].float()
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_TH, dtype=torch.float32) if need_hidden else None
        grad_weight = torch.empty_like(weight_VH) if need_weight else None
        grad_bias = torch.empty_like(bias_V) if need_bias else None
        for start in range(0, len(weight_VH), ctx.piece):
            logits_TP = _piece_of_logits(hidden_TH, weight_VH, bias_V, ctx.rule, start, ctx.piece)
            slope = ctx.rule.slope(logits_TP) / ctx.temperature
            # d log p(label) / d logits = onehot(label) - softmax
            grad_TP = _divide(logits_TP, ctx.temperature).sub_(lse_T[:, None]).exp_().neg_()
            inside_T, local_T = _inside(labels_T, start, logits_TP.shape[-1])
            grad_TP.scatter_add_(-1, local_T[:, None], inside_T[:, None].float())
            grad_TP = grad_TP.mul_(slope).mul_(grad_T[:, None]).to(hidden_TH.dtype)
            end = start + logits_TP.shape[-1]
            if grad_hidden is not None:
                grad_hidden += (grad_TP @ weight_VH[start:end]).float()
            if grad_weight is not None:
                grad_weight[start:end] = grad_TP.T @ hidden_TH
            if grad_bias is not None:
                grad_bias[start:end] = grad_TP.sum(0)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden_TH.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _piece_of_logits(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    rule: LogitRule,
    start: int,
    piece: int,
) -> torch.Tensor:
    logits = hidden_TH @ weight_VH[start : start + piece].T
    if bias_V is not None:
        logits = logits + bias_V[start : start + piece]
    return rule.apply(logits)


def _divide(logits_TP: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide in place, and return the same tensor."""
    return logits_TP if temperature == 1 else logits_TP.div_(temperature)


def _logsumexp(logits_TP: torch.Tensor) -> torch.Tensor:
    """Return the bits of `logits_TP.logsumexp(-1)`, and overwrite `logits_TP` instead of making a copy of it."""
    most_T1 = logits_TP.amax(-1, keepdim=True)
    most_T1 = most_T1.masked_fill(most_T1.abs() == torch.inf, 0.0)
    return logits_TP.sub_(most_T1).exp_().sum(-1).log_().add_(most_T1[:, 0])


def _inside(labels_T: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    local_T = labels_T - start
    return (local_T >= 0) & (local_T < width), local_T.clamp(0, width - 1)
