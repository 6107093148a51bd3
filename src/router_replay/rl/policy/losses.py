"""Compute the policy losses GRPO, Dr.GRPO and GSPO, with clipping, truncated importance weights and a reference KL.

    loss, sums = policy_loss(slots, LossConfig(kind="grpo"), Totals(tokens=512, sequences=32, max_tokens=16))
    loss.backward()

    objective of a slot = weight * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) - kl * k3
    weight: of old / rollout, and of the token's age in policy versions
    ratio: now / old, of the token (grpo, dr_grpo) or of its sequence (gspo)
    loss = -(a mean of the slots' objectives: by tokens, by sequences, or by a constant)

Sums are divided by `Totals`, which are counted over the whole mini-batch on all ranks, so the losses of micro-batches
add up to the loss of the mini-batch, and so do their gradients. A slot outside the mask contributes exactly zero to
both, whatever its values are: it is replaced before anything is computed, since 0 * inf is not 0.

Tensors are [T], one entry per slot of a packed micro-batch, in the dtype of the given log-probs. Nothing here waits for
the device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from router_replay.errors import BatchError, ConfigError, TrainError
from router_replay.rl.config import LossConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Hold what the loss needs for each slot of a micro-batch. All tensors have the shape [T].

    - `logprobs`: log-probs of the current policy ("now"), with gradient.
    - `old_logprobs`: log-probs of the old-policy pass.
    - `rollout_logprobs`: log-probs of the engine at the time of sampling.
    - `advantages`: the advantage A of each slot's episode.
    - `mask`: bool; True for slots whose label bears loss.
    - `sequences`: int64; the number of each slot's sequence. Numbers need not start at 0 or be dense; -1 is padding.
    - `reference_logprobs`: log-probs of the reference model, or None if there is none.
    - `ages`: int64; the version being updated minus the version that sampled the token, or None if it is 0 everywhere.

    Every sequence must be complete, because gspo and the mean over sequences use all of its tokens. Its slots may be
    anywhere. Raise BatchError if the shapes differ, or if `mask` is not bool.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: Tensor
    reference_logprobs: Tensor | None = None
    ages: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for field in dataclasses.fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None and (tensor.ndim != 1 or tensor.shape != shape):  # [T, 1] would broadcast silently
                raise BatchError(f"{field.name}: expected [{shape.numel()}] like logprobs, got {list(tensor.shape)}")
        if self.mask.dtype != torch.bool:
            raise BatchError(f"mask: expected bool, got {self.mask.dtype}")


@dataclasses.dataclass(frozen=True)
class Totals:
    """Hold the divisors of the sums, counted over the whole mini-batch on all ranks. All must be at least 1.

    `tokens`: the number of tokens that bear loss. `sequences`: the number of sequences. `max_tokens`: the maximum
    number of tokens that an episode can sample, the constant of Dr.GRPO.
    """

    tokens: int
    sequences: int
    max_tokens: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.sequences, self.max_tokens) < 1:
            raise TrainError(
                f"expected at least 1 of each, got {self}: a mini-batch without tokens that bear loss has no mean"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class LossSums:
    """Hold sums over the masked slots, as detached 0-d float64 device tensors; `a + b` adds two micro-batches.

    - `tokens`: the number of masked slots.
    - `ppo_kl`: sum of old - now, an estimate of KL(old || now).
    - `clipped`: the number of tokens whose gradient the clip removed; for gspo, all tokens of such sequences.
    - `kl`: sum of k3 to the reference model; 0 without one.
    - `entropy`: sum of -now of the sampled tokens, an estimate of the entropy.
    - `truncated`: the number of tokens whose importance weight was above the cap.
    """

    tokens: Tensor
    ppo_kl: Tensor
    clipped: Tensor
    kl: Tensor
    entropy: Tensor
    truncated: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        names = [field.name for field in dataclasses.fields(self)]
        return LossSums(**{name: getattr(self, name) + getattr(other, name) for name in names})


def policy_loss(slots: Slots, config: LossConfig, totals: Totals, kl: float = 0.0) -> tuple[Tensor, LossSums]:
    """Return the micro-batch's share of the mini-batch's loss, and sums for the metrics.

    loss = -mean(weight * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) - kl * k3)

    `slots` has the tensors, and `config` the kind, the clip and the importance weight (`[loss]` in docs/training.md).
    `totals` has the divisors of the mean, counted over the whole mini-batch. `kl` is the weight of the KL to the
    reference model (the setting `reference.kl`). Raise ConfigError if `kl` is not 0 and there are no reference
    log-probs.

    With one token, now = -1.0, old = -1.5, A = 2.0 and the clip at 1.28: the ratio exp(0.5) = 1.65 is clipped,
    the loss is -(1.28 * 2.0) = -2.56, and its gradient is 0.
    """
    if kl and slots.reference_logprobs is None:
        raise ConfigError(
            f"reference.kl = {kl} needs the reference model's log-probs, but Slots.reference_logprobs is None"
        )
    slots = _zero_outside_mask(slots)
    if config.kind == "gspo":
        ratio = sequence_ratio(slots.logprobs, slots.old_logprobs, slots.mask, slots.sequences)
    else:
        ratio = token_ratio(slots.logprobs, slots.old_logprobs)
    objective = clipped_surrogate(ratio, slots.advantages, config.clip_low, config.clip_high)
    truncated = torch.zeros_like(slots.mask)
    if cap := config.truncated_importance:
        objective = importance_weight(slots.old_logprobs, slots.rollout_logprobs, cap) * objective
        truncated = token_ratio(slots.old_logprobs, slots.rollout_logprobs) > cap
    if slots.ages is not None and (config.age_weight != 1 or config.max_age):
        objective = age_weight(slots.ages, config.age_weight, config.max_age) * objective
    divergence = torch.zeros_like(objective)
    if slots.reference_logprobs is not None:
        divergence = k3(slots.logprobs, slots.reference_logprobs)
        objective = objective - kl * divergence
    sums = LossSums(
        tokens=_total(slots.mask),
        ppo_kl=_total(slots.old_logprobs - slots.logprobs),
        clipped=_total(is_clipped(ratio, slots.advantages, config.clip_low, config.clip_high)),
        kl=_total(divergence),
        entropy=_total(-slots.logprobs),
        truncated=_total(truncated),
    )
    return _mean(-objective, slots, config, totals), sums


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the ratio of each token, exp(now - old).

    `logprobs` are those of the current policy (now), `old_logprobs` those of the old one. now = ln 0.5 and
    old = ln 0.25 give 2.0.
    """
    return torch.exp(logprobs - old_logprobs)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """Return GSPO's ratio at each slot: exp(mean of now - old over the masked tokens of its sequence).

    `logprobs` are those of the current policy (now), `old_logprobs` those of the old one. `mask` says which slots
    count, and `sequences` is the number of each slot's sequence. Slots outside the mask must hold finite values.

    Token ratios 2.0 and 8.0 of one sequence give 4.0 at both. The gradient of a slot reaches all tokens of its
    sequence.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    return torch.exp(_sum_of_sequence(log_ratio, sequences) / _tokens_of_sequence(mask, sequences))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's objective, to be maximised: min(ratio * A, clip(ratio, 1 - low, 1 + high) * A).

    `ratio` is that of the token or of its sequence, and `advantages` has A of each token.

    With low = 0.2 and high = 0.28: ratio 2.0 gives 1.28 for A = 1 (no gradient) and -2.0 for A = -1 (with gradient);
    ratio 0.5 gives 0.5 for A = 1 (with gradient) and -0.8 for A = -1 (no gradient).
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where the clip removed the gradient, as a bool tensor.

    That is where `ratio` is above 1 + `high` and A > 0, or below 1 - `low` and A < 0. `advantages` has A of each token.
    """
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def importance_weight(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """Return the truncated importance weight min(exp(old - rollout), cap) of each token, without gradient.

    `old_logprobs` are those of the old-policy pass (old), `rollout_logprobs` those of the engine (rollout). With
    `cap` = 2.0: old = ln 0.5 gives 1.25 for rollout = ln 0.4, and 2.0, not 5.0, for rollout = ln 0.1.
    """
    return token_ratio(old_logprobs, rollout_logprobs).detach().clamp(max=cap)


def age_weight(ages: Tensor, factor: float, max_age: int) -> Tensor:
    """Return the weight of each token by its age in policy versions: `factor` to the power of the age.

    The weight is 0 where one of `ages` is above `max_age`, unless `max_age` is 0. A factor of 0.5 gives 1, 0.5 and 0.25
    for ages 0, 1 and 2; a factor of 0 gives 1, 0 and 0.
    """
    weights = torch.full_like(ages, factor, dtype=torch.float32) ** ages.clamp(min=0)
    return torch.where(ages > max_age, 0.0, weights) if max_age else weights


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate KL(now || reference) of each token as exp(d) - 1 - d with d = reference - now; it is never negative.

    `logprobs` are those of the current policy (now), `reference_logprobs` those of the reference model. The estimate
    is 2 - 1 - ln 2 = 0.3069 where the reference gives the token twice the probability, and 0 where they agree.
    """
    difference = reference_logprobs - logprobs
    return torch.expm1(difference) - difference


def token_mean(values: Tensor, totals: Totals) -> Tensor:
    """Return sum(values) / totals.tokens, the mean of GRPO over tokens.

    `values` must be 0 outside the mask. Sequences [1, 1, 1] and [5] give 8 / 4 = 2.
    """
    return values.sum() / totals.tokens


def sequence_mean(values: Tensor, mask: Tensor, sequences: Tensor, totals: Totals) -> Tensor:
    """Return the mean over sequences of their masked token means.

    The formula is sum(values / masked tokens of the sequence) / totals.sequences. `values` must be 0 outside the
    `mask`; `sequences` is the number of each slot's sequence. Sequences [1, 1, 1] and [5] give (1 + 5) / 2 = 3. GSPO
    uses this mean too, because its values are equal at all tokens of a sequence.
    """
    return (values / _tokens_of_sequence(mask, sequences)).sum() / totals.sequences


def constant_mean(values: Tensor, totals: Totals) -> Tensor:
    """Return Dr.GRPO's sum(values) / (totals.sequences * totals.max_tokens).

    The divisor does not depend on the length of a sequence, so each token counts the same. `values` must be 0 outside
    the mask. Sequences [1, 1, 1] and [5] with max_tokens = 4 give 8 / (2 * 4) = 1.
    """
    return values.sum() / (totals.sequences * totals.max_tokens)


def _mean(values: Tensor, slots: Slots, config: LossConfig, totals: Totals) -> Tensor:
    if config.kind == "dr_grpo":
        return constant_mean(values, totals)
    if config.kind == "gspo" or config.normalize == "sequence":
        return sequence_mean(values, slots.mask, slots.sequences, totals)
    return token_mean(values, totals)


def _zero_outside_mask(slots: Slots) -> Slots:
    """Zero log-probs and advantages outside the mask: the ratio is 1, the advantage 0, and no gradient flows."""
    names = ["logprobs", "old_logprobs", "rollout_logprobs", "advantages", "reference_logprobs"]
    given = {name: getattr(slots, name) for name in names if getattr(slots, name) is not None}
    kept = {name: torch.where(slots.mask, values, 0.0) for name, values in given.items()}
    return dataclasses.replace(slots, **kept)


def _total(values: Tensor) -> Tensor:
    return values.detach().sum(dtype=torch.float64)


def _tokens_of_sequence(mask: Tensor, sequences: Tensor) -> Tensor:
    """Return for each slot how many masked tokens its sequence has, at least 1, so that it can be a divisor."""
    return _sum_of_sequence(mask.to(torch.float32), sequences).clamp(min=1)


def _sum_of_sequence(values: Tensor, sequences: Tensor) -> Tensor:
    """Return for each slot the sum over all slots of its sequence.

    Sequences are renumbered by sorting, because `torch.unique` would wait for the device to know how many there are.
    """
    ordered, order = torch.sort(sequences)
    is_new = torch.zeros_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    numbers = torch.empty_like(order).scatter(0, order, is_new.cumsum(0))
    return torch.zeros_like(values).index_add(0, numbers, values)[numbers]
