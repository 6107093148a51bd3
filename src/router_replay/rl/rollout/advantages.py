"""Compute advantages: how much better an episode did than the others of the same problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router_replay.errors import RewardError
from router_replay.rl.config import LossKind

EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that differ by rounding alone do not become large advantages."""


def group_advantages(rewards: Sequence[float], groups: Sequence[int], kind: LossKind) -> np.ndarray:
    """Return the advantage of each episode, float64, in the order given.

    `rewards` has the reward of each episode, `groups` the number of its group, and `kind` is the loss.

        group_advantages([1, 0, 5, 5], groups=[7, 7, 3, 3], kind="grpo")     # [1, -1, 0, 0], nearly
        group_advantages([1, 0, 5, 5], groups=[7, 7, 3, 3], kind="dr_grpo")  # [0.5, -0.5, 0, 0]

    For grpo and gspo the advantage is (reward - mean) / (std + 1e-6) over the group, with the standard deviation of the
    group itself (divided by n, not n - 1). For dr_grpo it is reward - mean, because the division favours problems that
    are nearly always or nearly never solved. A group whose rewards are all equal gives exact zeros. Raise RewardError
    if a reward is not finite.
    """
    values = _checked(rewards, groups)
    numbers = np.asarray(groups)
    advantages = np.zeros(len(values))
    for group in np.unique(numbers):
        members = numbers == group
        own = values[members]
        if own.min() == own.max():  # the mean of equal numbers may differ from them by rounding
            continue
        centred = own - own.mean()
        advantages[members] = centred if kind == "dr_grpo" else centred / (own.std() + EPSILON)
    return advantages


def _checked(rewards: Sequence[float], groups: Sequence[int]) -> np.ndarray:
    if len(rewards) != len(groups):
        raise RewardError(f"expected one reward per episode, got {len(rewards)} for {len(groups)} episodes")
    values = np.asarray(rewards, np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        first = bad[0]
        raise RewardError(
            f"expected finite rewards, got {values[first]} for episode {first} of group {groups[first]} "
            f"({len(bad)} of {len(values)} are not finite): correct the reward function"
        )
    return values
