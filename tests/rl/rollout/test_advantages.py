"""Advantages: numbers worked out by hand, and what no reward may be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router_replay.errors import RewardError
from router_replay.rl.config import LossKind
from router_replay.rl.rollout.advantages import group_advantages

# Group 7 has 1, 0, 0, 3: mean 1, variance (0 + 1 + 1 + 4) / 4 = 1.5. Group 3 has 2, 4: mean 3, std 1.
REWARDS, GROUPS = [1, 2, 0, 0, 4, 3], [7, 3, 7, 7, 3, 7]


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_divided_by_the_standard_deviation_of_the_group(kind: LossKind) -> None:
    found = group_advantages(REWARDS, GROUPS, kind)
    wide, narrow = math.sqrt(1.5) + 1e-6, 1 + 1e-6
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx([0, -1 / narrow, -1 / wide, -1 / wide, 1 / narrow, 2 / wide], rel=1e-12)


def test_dr_grpo_does_not_divide() -> None:
    assert group_advantages(REWARDS, GROUPS, "dr_grpo").tolist() == [0, -1, -1, -1, 1, 2]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "gspo"])
def test_equal_rewards_give_exact_zeros(kind: LossKind) -> None:
    rewards = [0.1] * 3
    assert np.mean(rewards) != 0.1  # the rounding that must not become an advantage
    assert group_advantages([*rewards, 5.0], [0, 0, 0, 1], kind).tolist() == [0, 0, 0, 0]


def test_rewards_that_differ_by_rounding_stay_near_zero() -> None:
    assert np.abs(group_advantages([0.1, 0.1 + 1e-12], [0, 0], "grpo")).max() < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite(bad: float) -> None:
    message = rf"got {bad} for episode 2 of group 9 \(1 of 4 are not finite\): correct the reward function"
    with pytest.raises(RewardError, match=message):
        group_advantages([0.0, 1.0, bad, 1.0], [8, 8, 9, 9], "grpo")


def test_a_reward_too_few() -> None:
    with pytest.raises(RewardError, match="got 1 for 2 episodes"):
        group_advantages([0.0], [1, 1], "grpo")


def test_no_episodes() -> None:
    assert group_advantages([], [], "grpo").shape == (0,)
