"""Find how a router turns logits into the weights of its chosen experts, by probing the router.

vLLM has a router class per family and device, each with its own kernel. What they do to a chosen expert's logit comes
from a short list: a score (softmax, sigmoid, square root of softplus), optionally divided by the sum over the chosen
experts, times a constant. Instead of trusting class names, `find_rule` sends random logits through the router and
selects the rule that gives the same weights. If no rule does, forcing is refused at start.

Shapes: T tokens, L routed layers, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import torch

from router_replay.errors import EngineError

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
PROBES = 64
# Largest allowed difference of a weight, relative to the largest weight: the rounding error of the logits' dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclasses.dataclass(frozen=True)
class Rule:
    """Compute weight = score(logit) [/ sum over the chosen] * scale; `float32`: computed in float32 for any logits."""

    score: Score
    renormalize: bool
    scale: float
    float32: bool

    def weights(self, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return the weights [T, K] of these experts. Only the chosen experts are scored where no [T, E] is needed."""
        if self.float32:
            logits_TE = logits_TE.float()
        chosen_TK = logits_TE.gather(1, ids_TK)
        if self.score == "softmax" and self.renormalize:
            weights_TK = torch.softmax(chosen_TK, dim=-1)
        elif self.score == "softmax":
            weights_TK = (chosen_TK - torch.logsumexp(logits_TE, dim=-1, keepdim=True)).exp()
        elif self.score == "sigmoid":
            weights_TK = chosen_TK.sigmoid()
        else:
            weights_TK = torch.nn.functional.softplus(chosen_TK).sqrt()
        if self.renormalize and self.score != "softmax":
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK * self.scale


def force(
    rule: Rule,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    wanted_TLK: torch.Tensor,
    column: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the router's weights and ids, with the rows of `wanted_TLK` in this column where they are not -1.

    Where the router chose the wanted set by itself, its own answer is kept bit for bit, including the slot order, so
    forcing a run's own rows changes nothing. A GPU does the same by `force_kernel.force`.
    """
    wanted_TK = wanted_TLK[: len(ids_TK), column]
    wanted_KK = wanted_TK.unsqueeze(2) == ids_TK.unsqueeze(1)
    replace_T1 = (wanted_TK[:, :1] >= 0) & ~wanted_KK.any(dim=2).all(dim=1, keepdim=True)
    forced_TK = rule.weights(logits_TE, wanted_TK.clamp(min=0).to(torch.int64))
    return (
        torch.where(replace_T1, forced_TK.to(weights_TK.dtype), weights_TK),
        torch.where(replace_T1, wanted_TK.to(ids_TK.dtype), ids_TK),
    )


def find_rule(router: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Rule:
    """Return the rule that this router follows, tested with logits in float32 and in the model's dtype."""
    errors: dict[Rule, float] = dict.fromkeys(_candidates(router), 0.0)
    probed = 0
    for logits_dtype in dict.fromkeys((torch.float32, dtype)):
        generator = torch.Generator().manual_seed(0)
        logits_TE = torch.randn(PROBES, router.global_num_experts, generator=generator) * 2
        logits_TE = logits_TE.to(device, logits_dtype)
        hidden_TH = torch.zeros(PROBES, hidden_size, dtype=dtype, device=device)
        try:
            # Clone, because the kernels may write into their inputs.
            weights_TK, ids_TK = router._compute_routing(hidden_TH, logits_TE.clone(), None)
        except (RuntimeError, TypeError, AssertionError, ValueError) as error:
            refusal = error  # some kernels accept only one of the two dtypes
            continue
        if ids_TK.shape[1] != router.top_k:
            raise EngineError(
                f"{type(router).__name__} returns {ids_TK.shape[1]} experts per token, expected top_k={router.top_k}: "
                "if shared experts are fused into routing, turn that fusion off, because forced routing cannot "
                "distinguish them from routed experts"
            )
        probed += 1
        largest = float(weights_TK.abs().max())
        for rule in errors:
            difference = (rule.weights(logits_TE, ids_TK.to(torch.int64)).float() - weights_TK.float()).abs().max()
            # Errors are in units of the tolerance, so that the two dtypes have the same weight.
            errors[rule] = max(errors[rule], float(difference) / largest / TOLERANCE[logits_dtype])
    if not probed:
        raise EngineError(
            f"{type(router).__name__} could not route {PROBES} random tokens, as a test of its rule: {refusal}"
        ) from refusal
    best = min(errors, key=lambda rule: errors[rule])
    if not errors[best] <= 1.0:
        raise EngineError(
            f"{type(router).__name__} computes expert weights by a rule that forced routing does not support: expected "
            "softmax, sigmoid or sqrt-softplus, renormalised or not, times routed_scaling_factor. The nearest of "
            f"these, {best}, differs by {errors[best]:.1f} times the tolerance"
        )
    return best


def _candidates(router: Any) -> list[Rule]:
    """List the candidate rules, starting with the router's own settings, so that these win a tie."""
    scale = float(getattr(router, "routed_scaling_factor", None) or 1.0)
    said = (getattr(router, "scoring_func", "softmax"), bool(getattr(router, "renormalize", True)))
    scales = dict.fromkeys((scale, 1.0))
    rules = [
        Rule(score, renormalize, scale, float32)
        for score, renormalize, scale, float32 in itertools.product(SCORES, (True, False), scales, (True, False))
    ]
    return sorted(rules, key=lambda rule: (rule.score, rule.renormalize) != said)
