"""Draw the next token of every sequence of a batch, each by its own parameters and its own random numbers.

A sample brings one uniform number per token and takes the token where the cumulated distribution passes it. So what
a sample draws depends on its own seed and its own logits, whatever else is in the batch.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from router_replay.engines.types import Sampling


def draw(logits_BV: Any, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[Any, Any, Any]:
    """Tokens [B], their log-probs [B] at the sample's temperature before top-p, and where the logits were usable [B].

    Temperature 0 takes the likeliest token, and its log-prob is that of temperature 1.
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
    """Only the likeliest tokens that together reach top_p; the likeliest one always."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    outside_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
    outside_BV[:, 0] = False  # rounding must not empty the set
    return probs_BV.scatter(-1, order_BV, sorted_BV.masked_fill(outside_BV, 0.0))


def _at(probs_BV: Any, uniforms_B: Any) -> Any:
    """The first token whose cumulated probability is beyond the uniform number: never one of probability 0."""
    cumulated_BV = probs_BV.double().cumsum(-1)  # in float32, a large vocabulary would round small ones away
    targets_B1 = uniforms_B[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, targets_B1, right=True)[:, 0].clamp(max=probs_BV.shape[-1] - 1)
