"""The log-prob gap, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from router_replay.errors import MeasureError, RouterReplayError
from router_replay.measure import logprob_gap

LN2, LN4 = math.log(2), math.log(4)


def test_values_by_hand() -> None:
    # d = ln 2, -ln 2, 0: exp(d) - 1 - d = 1 - ln 2, -1/2 + ln 2, 0
    gap = logprob_gap([-1.0, -1.0 - LN2, -3.0], [-1.0 - LN2, -1.0, -3.0])
    assert gap.tokens == 3
    assert gap.k1 == pytest.approx(0.0, abs=1e-15)
    assert gap.k3 == pytest.approx(0.5 / 3, rel=1e-14)
    assert gap.abs_mean == pytest.approx(2 * LN2 / 3, rel=1e-14)
    assert gap.abs_max == pytest.approx(LN2, rel=1e-14)


def test_the_sign_is_of_rollout_against_train() -> None:
    # The rollout policy gave its samples more than the trainer does: KL(rollout || train) > 0.
    gap = logprob_gap(train_logprobs=[-2.0, -3.0], rollout_logprobs=[-1.0, -1.0])
    assert gap.k1 == 1.5
    assert gap.k3 == pytest.approx((math.exp(-1) + math.exp(-2) + 1) / 2, rel=1e-14)


def test_k1_and_k3_estimate_the_kl_of_the_rollout_policy() -> None:
    rollout, train = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    samples = np.repeat([0, 1, 2], [7, 2, 1])  # exactly the rollout's frequencies
    gap = logprob_gap(np.log(train)[samples], np.log(rollout)[samples])
    kl = float(np.sum(rollout * np.log(rollout / train)))
    assert gap.k1 == pytest.approx(kl, rel=1e-12)
    assert gap.k3 == pytest.approx(kl, rel=1e-12)


def test_k3_keeps_its_digits_where_the_gap_is_small() -> None:
    gap = logprob_gap([1e-6], [0.0])
    exact = 1e-12 / 2 + 1e-18 / 6  # the series of exp(d) - 1 - d
    assert gap.k3 == pytest.approx(exact, rel=1e-8, abs=0)
    assert math.exp(1e-6) - 1 - 1e-6 != pytest.approx(exact, rel=1e-5, abs=0)  # what the plain form loses


def test_float32_input_is_measured_in_float64() -> None:
    train, rollout = np.float32([-1.0, -2.0]), np.float32([-1.0001, -2.0])
    gap = logprob_gap(train, rollout)
    assert gap.abs_max == float(train[0]) - float(rollout[0])


def test_extreme_counts_ratios_beyond_tau_either_way() -> None:
    gap = logprob_gap([0.0, LN4, 0.0, -1.0], [LN4, 0.0, 0.5, -1.0])
    assert gap.extreme() == 0.5
    assert gap.extreme(tau=4.0) == 0.0  # exceeds, not reaches
    assert gap.extreme(tau=1.5) == 0.75
    for tau in (0.0, 0.5, -1.0, math.nan, math.inf):
        with pytest.raises(MeasureError, match="tau"):
            gap.extreme(tau)


def test_only_masked_tokens_count() -> None:
    train, rollout = [[0.0, 9.0], [1.0, math.nan]], [[0.0, 0.0], [0.0, 0.0]]
    for mask in ([[True, False], [True, False]], [[1, 0], [1, 0]], [[1.0, 0.0], [1.0, 0.0]]):
        gap = logprob_gap(train, rollout, mask)
        assert (gap.tokens, gap.abs_max, gap.abs_mean, gap.extreme()) == (2, 1.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("train", "rollout", "mask", "message"),
    [
        ([1.0, 2.0], [1.0], None, r"the same shape, got \[2\] and \[1\]"),
        ([1.0, 2.0], [1.0, 2.0], [True], r"mask must have the shape \[2\]"),
        ([1.0, 2.0], [1.0, 2.0], [2, 1], "only 0 and 1"),
        ([1.0, 2.0], [1.0, 2.0], ["a", "b"], "only 0 and 1"),
        ([1.0, 2.0], [1.0, 2.0], [False, False], "select at least one token, got none of 2"),
        ([], [], None, "select at least one token, got none of 0"),
        ([1.0, math.nan], [1.0, 2.0], None, r"train_logprobs\[1\] must be finite.*got nan"),
        ([[1.0, 1.0]], [[1.0, math.nan]], None, r"rollout_logprobs\[\(0, 1\)\] must be finite.*got nan"),
        ([1.0, -math.inf], [1.0, 2.0], None, r"train_logprobs\[1\] must be finite.*got -inf"),
        ("abc", [1.0], None, "train_logprobs must be numbers"),
        ([1.0], [None, [1]], None, "rollout_logprobs must be numbers"),
    ],
)
def test_what_cannot_be_measured(train: Any, rollout: Any, mask: Any, message: str) -> None:
    with pytest.raises(MeasureError, match=message) as info:
        logprob_gap(train, rollout, mask)
    assert isinstance(info.value, ValueError)
    assert isinstance(info.value, RouterReplayError)


class FakeTensor:
    """What the measure may use of a torch tensor, in the order that works for any device and dtype."""

    def __init__(self, values: Any, done: tuple[str, ...] = ()) -> None:
        self.values, self.done = values, done

    def detach(self) -> FakeTensor:
        return FakeTensor(self.values, (*self.done, "detach"))

    def cpu(self) -> FakeTensor:
        return FakeTensor(self.values, (*self.done, "cpu"))

    def double(self) -> FakeTensor:
        return FakeTensor(self.values, (*self.done, "double"))

    def numpy(self) -> np.ndarray:
        assert self.done == ("detach", "cpu", "double")
        return np.array(self.values, np.float64)


def test_tensors_are_taken_without_importing_torch() -> None:
    gap = logprob_gap(FakeTensor([0.0, 1.0]), FakeTensor([0.0, 0.0]), FakeTensor([False, True]))
    assert (gap.tokens, gap.k1) == (1, -1.0)


def test_real_tensors() -> None:
    torch = pytest.importorskip("torch")
    train = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    gap = logprob_gap(train, torch.tensor([-1.0, -2.5]), torch.tensor([True, True]))
    assert (gap.tokens, gap.k1) == (2, -0.25)


def test_a_gap_does_not_change() -> None:
    gap = logprob_gap([1.0], [2.0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        gap.k1 = 0.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        gap.differences[0] = 0.0
    assert gap == logprob_gap([1.0], [2.0])


def test_an_overflow_is_infinite_and_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    assert logprob_gap([1000.0], [0.0]).k3 == math.inf
    assert not recwarn.list


def test_a_ratio_of_one_is_the_least_that_can_be_exceeded() -> None:
    gap = logprob_gap([-1.0, -2.0], [-1.0, -2.5])
    assert gap.extreme(1.0) == 0.5
    for tau in (0.99, np.inf, np.nan):
        with pytest.raises(MeasureError, match="1 or more"):
            gap.extreme(tau)


def test_gaps_compare_and_print_by_their_numbers() -> None:
    gap, again = (logprob_gap([-1.0, -2.0], [-1.0, -2.5]) for _ in range(2))
    assert gap == again
    assert "differences" not in repr(gap)
