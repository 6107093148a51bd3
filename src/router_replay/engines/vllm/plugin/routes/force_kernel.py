"""Do what `rules.force` does in one Triton kernel, because a GPU runs it in every layer of a step with forced rows.

With torch.compile, a call took 240 microseconds of the CPU on an H200 machine, most of them in the checks before the
compiled code. In steps with prompts, in which the CPU is the slower part, these are lost.

Shapes: T tokens, L routed layers, E experts, K top-k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from router_replay.engines.vllm.plugin.routes.rules import SCORES, Rule

TOKENS = 32  # of one program
SOFTMAX, SIGMOID = tl.constexpr(SCORES.index("softmax")), tl.constexpr(SCORES.index("sigmoid"))


def force(
    rule: Rule,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    wanted_TLK: torch.Tensor,
    column: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rules.force` returns. No branch depends on data, so a CUDA graph can capture it."""
    tokens, top_k = ids_TK.shape
    experts = logits_TE.shape[1]
    weights_TK, ids_TK, logits_TE = weights_TK.contiguous(), ids_TK.contiguous(), logits_TE.contiguous()
    found = torch.empty_like(weights_TK), torch.empty_like(ids_TK)
    _force[(triton.cdiv(tokens, TOKENS),)](
        weights_TK, ids_TK, logits_TE, wanted_TLK, *found, tokens, column, rule.scale, wanted_TLK.stride(0),
        EXPERTS=experts, TOP_K=top_k, ALL_EXPERTS=triton.next_power_of_2(experts),
        SLOTS=triton.next_power_of_2(top_k), TOKENS=TOKENS, SCORE=SCORES.index(rule.score),
        RENORMALIZE=rule.renormalize, ROUNDED=not rule.float32,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["tokens", "column", "scale"])  # one kernel for all numbers of tokens
def _force(
    weights: tl.tensor, ids: tl.tensor, logits: tl.tensor, wanted: tl.tensor, new_weights: tl.tensor,
    new_ids: tl.tensor, tokens: tl.tensor, column: tl.tensor, scale: tl.tensor, wanted_stride: tl.tensor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ALL_EXPERTS: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, ROUNDED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    inside, used = (row < tokens)[:, None], (slot < TOP_K)[None, :]
    here = inside & used
    place = row[:, None] * TOP_K + slot[None, :]
    own_ids = tl.load(ids + place, here, -1).to(tl.int32)
    own_weights = tl.load(weights + place, here, 0.0)
    wanted_row = wanted + row.to(tl.int64) * wanted_stride + column * TOP_K
    chosen = tl.load(wanted_row[:, None] + slot[None, :], here, -1).to(tl.int32)

    # The router's own answer stays if it chose the same set. Slots beyond the top-k are -1 on both sides.
    among = tl.max((chosen[:, :, None] == own_ids[:, None, :]).to(tl.int32), axis=2)
    same = tl.min(among, axis=1) == 1
    free = tl.min(tl.where(used, chosen, 0), axis=1) < 0
    replaced = (~same & ~free)[:, None] & here

    logit_row = logits + row.to(tl.int64)[:, None] * EXPERTS
    logit = tl.load(logit_row + tl.maximum(chosen, 0), here, 0.0).to(tl.float32)
    if SCORE == SOFTMAX and RENORMALIZE:
        weight = tl.exp(logit - tl.max(tl.where(used, logit, float("-inf")), axis=1)[:, None])
    elif SCORE == SOFTMAX:
        expert = tl.arange(0, ALL_EXPERTS)[None, :]
        every = tl.load(logit_row + expert, inside & (expert < EXPERTS), 0.0).to(tl.float32)
        every = tl.where(expert < EXPERTS, every, float("-inf"))
        largest = tl.max(every, axis=1)[:, None]
        weight = tl.exp(logit - largest) / tl.sum(tl.exp(every - largest), axis=1)[:, None]
    elif SCORE == SIGMOID:
        weight = 1 / (1 + tl.exp(-logit))
    else:  # the square root of softplus; for a small number, the logarithm of 1 + it is taken from its series
        small = tl.exp(-tl.abs(logit))
        series = small * (1 - small * (0.5 - small / 3))
        weight = tl.sqrt(tl.maximum(logit, 0.0) + tl.where(small < 0.01, series, tl.log(1 + small)))
    if RENORMALIZE:
        weight = weight / tl.sum(tl.where(used, weight, 0.0), axis=1)[:, None]
    weight = weight * scale
    if ROUNDED:
        weight = weight.to(logits.dtype.element_ty)
    tl.store(new_weights + place, tl.where(replaced, weight.to(own_weights.dtype), own_weights), here)
    tl.store(new_ids + place, tl.where(replaced, chosen, own_ids).to(new_ids.dtype.element_ty), here)
