"""Samples the next token of every sequence of a batch, each with its own parameters and random numbers.

Each sample provides one uniform number per token and takes the token where the cumulative distribution exceeds it. The
result depends only on the sample's own seed and logits, and not on the rest of the batch.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from router_replay.engines.types import Sampling


def draw(logits_BV: Any, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[Any, Any, Any]:
    """Sample one token per sequence.

    Returns the tokens [B], their log-probs [B] at the sample's temperature before top-p, and whether the logits were
    usable [B]. Temperature 0 takes the most likely token, and returns its log-prob at temperature 1.
    """
    device = logits_BV.device
    logits_BV = logits_BV.float()
    greedy = [sampling.temperature == 0 for sampling in samplings]
    temperature_B = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=device)
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], dim=-1)
    usable_B = torch.isfinite(logprobs_BV.amax(-1))  # a NaN or an infinite logit makes the whole row NaN
    tokens_B = logits_BV.argmax(-1)
    if not all(greedy):
        probs_BV = logprobs_BV.exp()
        if any(sampling.top_p < 1 for sampling in samplings):
            top_p_B = torch.tensor([sampling.top_p for sampling in samplings], device=device)
            probs_BV = _nucleus(probs_BV, top_p_B)
        sampled_B = _at(probs_BV, torch.tensor(uniforms, dtype=torch.float64, device=device))
        tokens_B = torch.where(torch.tensor(greedy, device=device), tokens_B, sampled_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0], usable_B


def _nucleus(probs_BV: Any, top_p_B: Any) -> Any:
    """Keep only the most likely tokens that together reach top_p; the most likely token is always kept."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    outside_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
    outside_BV[:, 0] = False  # rounding must not empty the set
    return probs_BV.scatter(-1, order_BV, sorted_BV.masked_fill(outside_BV, 0.0))


def _at(probs_BV: Any, uniforms_B: Any) -> Any:
    """Return the first token whose cumulative probability exceeds the uniform number; never one of probability 0."""
    cumulated_BV = probs_BV.double().cumsum(-1)  # in float32, a large vocabulary would round small ones away
    targets_B1 = uniforms_B[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, targets_B1, right=True)[:, 0].clamp(max=probs_BV.shape[-1] - 1)
