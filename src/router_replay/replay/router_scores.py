"""RouterScores finds the distribution over all experts that a router computes in a call.

Families score experts in three ways, and all of them are seen from outside, by the operations of the call:

    softmax over all experts, then the choice     (qwen3_moe, mixtral)      that softmax
    sigmoid, or the root of softplus, the choice  (deepseek_v3, minimax_m2) the scores over their sum
    the choice by logits, then softmax or sigmoid (gpt_oss, llama4)         the same of the logits of all experts

A bias that only takes part in the choice, and the mask of group-limited routing, come after the scores and are no part
of the distribution. Shapes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SOFTMAX = (torch.softmax, functional.softmax, Tensor.softmax)
SIGMOID = (torch.sigmoid, functional.sigmoid, Tensor.sigmoid)
ROOT_OF_SOFTPLUS = (functional.softplus, torch.sqrt, Tensor.sqrt)
ACTIVATIONS = (*SOFTMAX, *SIGMOID, *ROOT_OF_SOFTPLUS)


class RouterScores:
    """Watches one call of a router with `num_experts` experts; `figures` then gives what it measured."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._scores: Tensor | None = None  # the last activation before the choice
        self._sums_to_one = False
        self._offered: Tensor | None = None  # what the first choice chose from
        self._is_sigmoid = False  # of the logits, where the choice comes first
        self._places: Tensor | None = None  # of the chosen experts among the offered scores

    def see(self, func: Any, out: Any) -> None:
        """Look at the result `out` of the operation `func` of the router, one of ACTIVATIONS."""
        if self._offered is not None:
            self._is_sigmoid = self._is_sigmoid or func in SIGMOID
        elif isinstance(out, Tensor) and out.ndim and out.shape[-1] >= self._num_experts:
            self._scores = out.detach()
            self._sums_to_one = func in SOFTMAX and out.shape[-1] == self._num_experts

    def offer(self, scores: Tensor) -> None:
        """Look at the scores [..., E] that an operation chooses from; only the first of several counts."""
        if self._offered is None:
            self._offered = scores.detach()

    def choose(self, places: Tensor) -> None:
        """Look at the places [..., K] of the chosen experts among the offered scores."""
        self._places = places

    def figures(self) -> Tensor:
        """Return [2, T]: for each token the mass of the chosen experts, and the entropy in nats.

        They are computed without a graph: a recompute measures nothing, and must save the same tensors.
        """
        assert self._places is not None
        with torch.no_grad():
            return figures_of(self._distribution(), self._places.reshape(-1, self._places.shape[-1]))

    def _distribution(self) -> Tensor:
        """Return the distribution, [T, E], in float32."""
        assert self._offered is not None
        if self._scores is None:
            logits_TE = self._offered.reshape(-1, self._num_experts)
            return distribution_of(logits_TE, is_sigmoid=self._is_sigmoid)
        scores_TE = self._scores.reshape(-1, self._scores.shape[-1]).float()
        if self._sums_to_one:
            return scores_TE
        scores_TE = scores_TE[:, : self._num_experts]  # inkling scores its shared experts too
        return scores_TE / scores_TE.sum(-1, keepdim=True)


def distribution_of(logits_TE: Tensor, *, is_sigmoid: bool) -> Tensor:
    """Return the distribution of a router with these `logits_TE`: their softmax, or their sigmoid over its sum."""
    if not is_sigmoid:
        return logits_TE.float().softmax(-1)
    scores_TE = logits_TE.float().sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True)


def figures_of(probabilities_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return [2, T]: the mass that the distribution gives to the chosen experts, and its entropy in nats."""
    mass_T = probabilities_TE.gather(-1, chosen_TK).sum(-1)
    return torch.stack([mass_T, torch.special.entr(probabilities_TE).sum(-1)])
