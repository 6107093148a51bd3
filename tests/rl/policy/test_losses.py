"""The losses: values by hand, gradients by another formula, and what must not change them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from router_replay.errors import BatchError, ConfigError, TrainError
from router_replay.rl.config import LossConfig
from router_replay.rl.policy.losses import (
    LossSums,
    Slots,
    Totals,
    age_weight,
    clipped_surrogate,
    constant_mean,
    importance_weight,
    is_clipped,
    k3,
    policy_loss,
    sequence_mean,
    sequence_ratio,
    token_mean,
    token_ratio,
)

LN2 = math.log(2)
GRPO = LossConfig(kind="grpo")
BY_SEQUENCE = LossConfig(kind="grpo", normalize="sequence")
DR_GRPO = LossConfig(kind="dr_grpo")
GSPO = LossConfig(kind="gspo")
LOSSES = [GRPO, BY_SEQUENCE, DR_GRPO, GSPO]
every_loss = pytest.mark.parametrize("config", LOSSES, ids=["grpo", "by_sequence", "dr_grpo", "gspo"])
TOTALS = Totals(tokens=4, sequences=2, max_tokens=8)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def four_tokens(**changes: Any) -> Slots:
    """Sequence 5 has tokens of ratio 2, 1, 1/2 and A = 1; sequence 9 has one of ratio 4 and A = -1."""
    slots = Slots(
        logprobs=floats(LN2, 0, -LN2, 2 * LN2).requires_grad_(),
        old_logprobs=floats(0, 0, 0, 0),
        rollout_logprobs=floats(0, 0, 0, 0),
        advantages=floats(1, 1, 1, -1),
        mask=torch.tensor([True] * 4),
        sequences=torch.tensor([5, 5, 5, 9]),
        ages=torch.tensor([0, 1, 2, 1]),
    )
    return dataclasses.replace(slots, **changes)


def capped(config: LossConfig, cap: float) -> LossConfig:
    return config.model_copy(update={"truncated_importance": cap})


def gradient(loss: Tensor, slots: Slots) -> list[float]:
    return torch.autograd.grad(loss, slots.logprobs)[0].tolist()


# -- values by hand -------------------------------------------------------------------------------


def test_a_token_counts_less_the_older_it_is_or_not_at_all() -> None:
    """Ages 0, 1, 2 and 1; the mean still divides by all tokens."""
    assert age_weight(torch.tensor([0, 1, 2, 5]), 0.5, 0).tolist() == [1, 0.5, 0.25, 0.03125]
    assert age_weight(torch.tensor([0, 1, 2, 5]), 0.5, 2).tolist() == [1, 0.5, 0.25, 0]
    assert age_weight(torch.tensor([0, 1, -1]), 0.0, 0).tolist() == [1, 0, 1]  # of lost weights: never above 1
    slots = four_tokens()
    whole = gradient(policy_loss(slots, GRPO, TOTALS)[0], slots)
    assert any(whole)
    for factor, limit, weights in ((0.5, 0, [1, 0.5, 0.25, 0.5]), (1.0, 1, [1, 1, 0, 1]), (0.0, 0, [1, 0, 0, 0])):
        config = GRPO.model_copy(update={"age_weight": factor, "max_age": limit})
        slots = four_tokens()
        found = gradient(policy_loss(slots, config, TOTALS)[0], slots)
        assert found == pytest.approx([weight * value for weight, value in zip(weights, whole, strict=True)])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPO, (-1.28 - 1.0 - 0.5 + 4.0) / 4),
        (BY_SEQUENCE, (-(1.28 + 1.0 + 0.5) / 3 + 4.0) / 2),
        (DR_GRPO, (-1.28 - 1.0 - 0.5 + 4.0) / (2 * 8)),
        (GSPO, (-1.0 + 4.0) / 2),  # the ratio of sequence 5 is the cube root of 2 * 1 * 1/2
    ],
)
def test_each_loss(config: LossConfig, expected: float) -> None:
    assert policy_loss(four_tokens(), config, TOTALS)[0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPO, [0, -1.0 / 4, -0.5 / 4, 4.0 / 4]),  # the first is clipped
        (BY_SEQUENCE, [0, -1.0 / 6, -0.5 / 6, 4.0 / 2]),
        (DR_GRPO, [0, -1.0 / 16, -0.5 / 16, 4.0 / 16]),
        (GSPO, [-1 / 6, -1 / 6, -1 / 6, 4.0 / 2]),  # every token of a sequence has its share
    ],
)
def test_the_gradient_of_each_loss(config: LossConfig, expected: list[float]) -> None:
    slots = four_tokens()
    assert gradient(policy_loss(slots, config, TOTALS)[0], slots) == pytest.approx(expected, rel=1e-12)


def test_gspo_clips_whole_sequences() -> None:
    slots = four_tokens(logprobs=floats(3 * LN2, 0, 0, -LN2).requires_grad_())  # ratios 2 and 1/2
    loss, sums = policy_loss(slots, GSPO, TOTALS)
    assert loss.item() == pytest.approx((-1.28 + 0.8) / 2, rel=1e-12)
    assert gradient(loss, slots) == [0, 0, 0, 0]
    assert sums.clipped.item() == 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPO, (-0.64 - 1.0 - 1.0 + 4.0) / 4),
        (BY_SEQUENCE, (-2.64 / 3 + 4.0) / 2),
        (DR_GRPO, (-0.64 - 1.0 - 1.0 + 4.0) / 16),
        (GSPO, (-(0.5 + 1.0 + 2.0) / 3 + 4.0) / 2),
    ],
)
def test_importance_weights_are_truncated(config: LossConfig, expected: float) -> None:
    slots = four_tokens(rollout_logprobs=floats(LN2, 0, -math.log(5), 0))  # weights 1/2, 1, 5 -> 2, 1
    loss, sums = policy_loss(slots, capped(config, 2.0), TOTALS)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert sums.truncated.item() == 1


@pytest.mark.parametrize(("config", "share"), [(GRPO, 1 / 4), (BY_SEQUENCE, 1 / 6), (DR_GRPO, 1 / 16), (GSPO, 1 / 6)])
def test_the_kl_to_the_reference_is_added_with_the_same_mean(config: LossConfig, share: float) -> None:
    plain = four_tokens()
    slots = four_tokens(reference_logprobs=floats(2 * LN2, 0, -LN2, 2 * LN2))  # differs at the first token only
    without, with_kl = policy_loss(plain, config, TOTALS)[0], policy_loss(slots, config, TOTALS, kl=0.1)[0]
    assert (with_kl - without).item() == pytest.approx(0.1 * (2 - 1 - LN2) * share, rel=1e-12)
    added = np.subtract(gradient(with_kl, slots), gradient(without, plain))
    assert added == pytest.approx([0.1 * (1 - 2) * share, 0, 0, 0], rel=1e-12)


def test_importance_weights_do_not_weigh_the_kl() -> None:
    slots = four_tokens(
        advantages=floats(0, 0, 0, 0),
        rollout_logprobs=floats(-9, -9, -9, -9),
        reference_logprobs=floats(2 * LN2, 0, -LN2, 2 * LN2),
    )
    loss = policy_loss(slots, capped(GRPO, 3.0), TOTALS, kl=1.0)[0]
    assert loss.item() == pytest.approx((1 - LN2) / 4, rel=1e-12)


def test_the_sums() -> None:
    slots = four_tokens(reference_logprobs=floats(2 * LN2, 0, -LN2, LN2), old_logprobs=floats(0, 0, 0, 1))
    _, sums = policy_loss(slots, GRPO, TOTALS)  # the last token: now 2 ln 2, old 1, reference ln 2
    expected = {
        "tokens": 4,
        "ppo_kl": 1 - 2 * LN2,
        "clipped": 1,
        "kl": (1 - LN2) + (0.5 - 1 + LN2),
        "entropy": -2 * LN2,
        "truncated": 0,
    }
    found = {field.name: getattr(sums, field.name) for field in dataclasses.fields(sums)}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-12)
    for value in found.values():
        assert (value.shape, value.dtype, value.requires_grad) == ((), torch.float64, False)
    assert (sums + sums).ppo_kl.item() == pytest.approx(2 - 4 * LN2, rel=1e-12)


# -- the pieces -----------------------------------------------------------------------------------


def test_token_ratio() -> None:
    assert token_ratio(floats(math.log(0.5)), floats(math.log(0.25))).tolist() == pytest.approx([2.0])


def test_sequence_ratio_is_the_geometric_mean_of_masked_tokens() -> None:
    now = floats(math.log(2), math.log(100), math.log(3), math.log(8))
    mask = torch.tensor([True, False, True, True])
    ratio = sequence_ratio(now, torch.zeros(4, dtype=torch.float64), mask, torch.tensor([70, 70, -3, 70]))
    assert ratio.tolist() == pytest.approx([4.0, 4.0, 3.0, 4.0], rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (2.0, 1.0, 1.28, 0.0),
        (2.0, -1.0, -2.0, -1.0),
        (0.5, 1.0, 0.5, 1.0),
        (0.5, -1.0, -0.8, 0.0),
        (1.0, 3.0, 3.0, 3.0),  # where both branches are equal the gradient is whole
        (1.25, 2.0, 2.5, 2.0),  # clip-higher: above 1.2
        (0.79, -1.0, -0.8, 0.0),
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, objective: float, slope: float) -> None:
    at = floats(ratio).requires_grad_()
    value = clipped_surrogate(at, floats(advantage), 0.2, 0.28)
    assert value.item() == pytest.approx(objective)
    assert torch.autograd.grad(value, at)[0].item() == slope
    assert is_clipped(at, floats(advantage), 0.2, 0.28).item() == (slope == 0 and advantage != 0)


def test_importance_weight() -> None:
    old = floats(math.log(0.5), math.log(0.5), 900.0).requires_grad_()
    weight = importance_weight(old, floats(math.log(0.4), math.log(0.1), 0.0), 2.0)
    assert weight.tolist() == pytest.approx([1.25, 2.0, 2.0])
    assert not weight.requires_grad


def test_k3_is_zero_where_they_agree_and_keeps_its_digits_near_it() -> None:
    assert k3(floats(-1.0, -1.0), floats(-1.0, -1.0 + LN2)).tolist() == pytest.approx([0, 1 - LN2], rel=1e-12)
    assert k3(floats(0.0), floats(1e-6)).item() == pytest.approx(1e-12 / 2 + 1e-18 / 6, rel=1e-8, abs=0)


def test_the_means() -> None:
    values, mask = floats(1, 1, 1, 5, 0), torch.tensor([True, True, True, True, False])
    sequences = torch.tensor([4, 4, 4, 2, 2])
    totals = Totals(tokens=4, sequences=2, max_tokens=4)
    assert token_mean(values, totals).item() == 2
    assert sequence_mean(values, mask, sequences, totals).item() == pytest.approx(3)
    assert constant_mean(values, totals).item() == 1


# -- what must not matter -------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_slots_outside_the_mask_give_exactly_nothing(config: LossConfig, bad: float) -> None:
    clean = four_tokens(reference_logprobs=floats(0, 0, 0, 0))
    names = ["logprobs", "old_logprobs", "rollout_logprobs", "advantages", "reference_logprobs"]
    dirty = Slots(
        **{name: torch.cat([getattr(clean, name).detach(), floats(bad, bad)]).requires_grad_() for name in names},
        mask=torch.tensor([True] * 4 + [False] * 2),
        sequences=torch.tensor([5, 5, 5, 9, 5, -1]),
    )
    config = capped(config, 2.0)
    expected, expected_sums = policy_loss(clean, config, TOTALS, kl=0.1)
    loss, sums = policy_loss(dirty, config, TOTALS, kl=0.1)
    assert loss.item() == expected.item()
    assert gradient(loss, dirty) == [*gradient(expected, clean), 0, 0]
    assert as_list(sums) == as_list(expected_sums)


@every_loss
def test_a_micro_batch_without_loss_still_has_a_backward_pass(config: LossConfig) -> None:
    slots = four_tokens(mask=torch.zeros(4, dtype=torch.bool))
    loss, _ = policy_loss(slots, config, TOTALS)
    assert loss.item() == 0
    assert gradient(loss, slots) == [0, 0, 0, 0]


@every_loss
def test_nothing_waits_for_the_device(config: LossConfig) -> None:
    """Meta tensors have no values: whoever asks for one raises."""
    clean = four_tokens(reference_logprobs=floats(0, 0, 0, 0))
    slots = Slots(**{field.name: getattr(clean, field.name).to("meta") for field in dataclasses.fields(clean)})
    loss, sums = policy_loss(slots, capped(config, 2.0), TOTALS, kl=0.1)
    assert loss.is_meta
    assert all(getattr(sums, field.name).is_meta for field in dataclasses.fields(sums))


@st.composite
def mini_batches(draw: st.DrawFn) -> tuple[Slots, list[list[int]], list[int]]:
    """Slots of a few sequences with padding between, their split into micro-batches, and another order of all."""
    numbers = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True))
    sequences = [number for number in numbers for _ in range(draw(st.integers(1, 5)))] + [-1] * draw(st.integers(0, 3))
    size = len(sequences)
    mask = [draw(st.booleans()) and number >= 0 for number in sequences]
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    now, old, rollout, reference = torch.from_numpy(generator.normal(-1, 0.5, (4, size)))
    slots = Slots(
        logprobs=now.requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=torch.from_numpy(generator.normal(size=51)[sequences]),
        mask=torch.tensor(mask),
        sequences=torch.tensor(sequences),
        reference_logprobs=reference,
        ages=torch.from_numpy(generator.integers(0, 4, size)),
    )
    home = {number: draw(st.integers(0, 2)) for number in [*numbers, -1]}
    split = [[slot for slot in range(size) if home[sequences[slot]] == micro] for micro in range(3)]
    return slots, [part for part in split if part], draw(st.permutations(range(size)))


def take(slots: Slots, places: list[int]) -> Slots:
    names = [field.name for field in dataclasses.fields(slots)]
    return Slots(**{name: getattr(slots, name)[places] for name in names})


def as_list(sums: LossSums) -> list[float]:
    return [getattr(sums, field.name).item() for field in dataclasses.fields(sums)]


@every_loss
@settings(deadline=None, max_examples=50)
@given(batch=mini_batches())
def test_micro_batches_add_up_and_order_and_padding_do_not_matter(config: LossConfig, batch: Any) -> None:
    slots, split, order = batch
    config, totals = capped(config, 1.2), Totals(tokens=17, sequences=6, max_tokens=8)
    whole, sums = policy_loss(slots, config, totals, kl=0.3)
    whole_gradient = gradient(whole, slots)
    no_padding = [place for place in order if slots.sequences[place] >= 0]
    for parts in (split, [order], [no_padding]):
        found = [policy_loss(take(slots, part), config, totals, kl=0.3) for part in parts]
        loss = functools.reduce(operator.add, [loss for loss, _ in found])
        assert loss.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
        assert gradient(loss, slots) == pytest.approx(whole_gradient, rel=1e-9, abs=1e-12)
        total = functools.reduce(operator.add, [part_sums for _, part_sums in found])
        assert as_list(total) == pytest.approx(as_list(sums), rel=1e-9, abs=1e-12)


@every_loss
@settings(deadline=None, max_examples=50)
@given(batch=mini_batches())
def test_the_gradient_by_another_formula(config: LossConfig, batch: Any) -> None:
    slots, _, _ = batch
    totals = Totals(tokens=17, sequences=6, max_tokens=8)
    loss, _ = policy_loss(slots, capped(config, 1.2), totals, kl=0.3)
    expected = gradient_by_hand(slots, config.kind, config.normalize, totals, cap=1.2, kl=0.3)
    assert gradient(loss, slots) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def gradient_by_hand(slots: Slots, kind: str, normalise: str, totals: Totals, cap: float, kl: float) -> list[float]:
    """Sequence by sequence, in plain numbers, with the clip at 0.8 and 1.28."""
    out = [0.0] * len(slots.mask)
    now, old, rollout = slots.logprobs.tolist(), slots.old_logprobs.tolist(), slots.rollout_logprobs.tolist()
    assert slots.reference_logprobs is not None
    reference, advantages = slots.reference_logprobs.tolist(), slots.advantages.tolist()
    masked = [place for place, kept in enumerate(slots.mask.tolist()) if kept]
    for _, group in itertools.groupby(masked, key=slots.sequences.tolist().__getitem__):
        places = list(group)
        n = len(places)
        share = 1 / totals.tokens
        if kind == "dr_grpo":
            share = 1 / (totals.sequences * totals.max_tokens)
        elif kind == "gspo" or normalise == "sequence":
            share = 1 / (totals.sequences * n)
        weights = {t: min(cap, math.exp(old[t] - rollout[t])) for t in places}
        for t in places:
            ratio, weight = math.exp(now[t] - old[t]), weights[t]
            if kind == "gspo":
                ratio = math.exp(sum(now[s] - old[s] for s in places) / n)
                weight = sum(weights.values()) / n
            clipped = ratio > 1.28 if advantages[t] > 0 else ratio < 0.8
            surrogate = 0.0 if clipped else weight * advantages[t] * ratio
            out[t] = -share * (surrogate - kl * (1 - math.exp(reference[t] - now[t])))
    return out


# -- what is refused ------------------------------------------------------------------------------


def test_a_kl_without_reference_logprobs() -> None:
    with pytest.raises(ConfigError, match=r"reference\.kl = 0\.1 needs"):
        policy_loss(four_tokens(), GRPO, TOTALS, kl=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.ones(1, 4)}, r"advantages: expected \[4\] like logprobs, got \[1, 4\]"),
        ({"old_logprobs": torch.ones(1)}, r"old_logprobs: expected \[4\] like logprobs, got \[1\]"),
        ({"mask": torch.ones(4)}, "mask: expected bool, got torch.float32"),
    ],
)
def test_slots_that_would_broadcast(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        four_tokens(**changes)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_totals_that_cannot_divide(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(TrainError, match="has no mean"):
        Totals(*numbers)


def test_a_ratio_at_the_clip_and_a_weight_at_the_cap_are_not_beyond_them() -> None:
    ratios, advantages = floats(1.25, 1.5, 0.5, 0.25, 1.5, 0.25), floats(1, 1, -1, -1, 0, 0)
    assert is_clipped(ratios, advantages, low=0.5, high=0.25).tolist() == [False, True, False, True, False, False]
    slots = four_tokens(old_logprobs=floats(0, LN2, LN2, 0), rollout_logprobs=floats(0, 0, -1, 0))
    config = LossConfig(kind="grpo", truncated_importance=float(torch.exp(floats(LN2))[0]))
    assert policy_loss(slots, config, TOTALS)[1].truncated == 1


def test_a_reference_without_a_kl_is_measured_and_changes_no_loss() -> None:
    slots = four_tokens(reference_logprobs=floats(1, 1, 1, 1))
    loss, sums = policy_loss(slots, GRPO, TOTALS)
    assert torch.equal(loss, policy_loss(four_tokens(), GRPO, TOTALS)[0])
    assert sums.kl > 0


def test_a_mini_batch_may_be_a_single_token() -> None:
    slots = Slots(floats(0), floats(0), floats(0), floats(3), torch.tensor([True]), torch.tensor([0]))
    assert policy_loss(slots, GRPO, Totals(tokens=1, sequences=1, max_tokens=1))[0] == -3
