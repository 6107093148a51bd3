"""Compare two series of measurements that were taken in turns, and say what the comparison can tell."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000
QUANTILE = 0.25  # other work on the machine makes a measurement longer, never shorter
LEAST_ROUNDS = 10  # the interval of fewer is too narrow to be believed


@dataclasses.dataclass(frozen=True)
class Share:
    """The speed of `other` as a share of the speed of `base`, over all rounds, with a bootstrap interval."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, base: Sequence[float], other: Sequence[float]) -> Share:
        """Compare the costs of the same rounds (seconds, for example): a share below 1 means that `other` costs more.

        `base` and `other` have one entry per round. Only entries of one round are compared with each other, so that a
        slow round affects both.
        """
        if len(base) != len(other) or not base:
            raise ValueError(f"expected as many rounds of both and at least one, got {len(base)} and {len(other)}")
        shares = np.asarray(base, float) / np.asarray(other, float)
        drawn = np.random.default_rng(0).integers(0, len(shares), (RESAMPLES, len(shares)))
        medians = np.median(shares[drawn], axis=1)
        low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return cls(statistics.median(shares.tolist()), float(low), float(high), len(shares))

    @classmethod
    def of_parts(cls, base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Share:
        """Compare the costs of the same rounds, each of which consists of parts, such as the steps of a turn.

        What `base` costs is the sum over its parts of the lower quartile over the rounds, and `other` likewise: pauses
        of the machine fall into other parts in each round, and count for nothing. What a part costs in every round
        counts in full, also if it is one part of many. The number of parts may differ between `base` and `other`.
        """
        if len(base) != len(other) or not base:
            raise ValueError(f"expected as many rounds of both and at least one, got {len(base)} and {len(other)}")
        base_RP, other_RP = np.asarray(base, float), np.asarray(other, float)
        drawn = np.random.default_rng(0).integers(0, len(base), (RESAMPLES // 4, len(base)))
        shares = cost_of_parts(base_RP[drawn]) / cost_of_parts(other_RP[drawn])
        low, high = np.quantile(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return cls(float(cost_of_parts(base_RP) / cost_of_parts(other_RP)), float(low), float(high), len(base))

    @property
    def noise(self) -> float:
        """The largest distance of the interval from 1. For two equal engines this is what the method cannot see."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def cost_of_parts(parts_RP: np.ndarray) -> np.ndarray:
    """Return the sum over the parts of the lower quartile over the rounds of [..., rounds, parts]."""
    return np.asarray(np.quantile(parts_RP, QUANTILE, axis=-2).sum(-1))


def verdict(share: Share, goal: float, same: Share) -> str:
    """Return "kept", "MISSED", or "no verdict" with the reason. `same` compares two engines that do not differ."""
    asked = 1 - goal
    rounds = min(share.rounds, same.rounds)
    if rounds < LEAST_ROUNDS:
        return f"no verdict: {rounds} rounds, at least {LEAST_ROUNDS} are needed"
    if share.high + same.noise < goal:  # too slow, even if all of the noise were to its disadvantage
        return "MISSED"
    if same.noise >= asked:
        return (
            f"no verdict: two equal engines differ by up to {same.noise:.3f}, the goal asks for {asked:.3f}. "
            "Run more rounds, or use a quieter machine"
        )
    if share.low >= goal:
        return "kept"
    if share.high < goal:
        return "MISSED"
    return f"no verdict: the goal lies in the interval [{share.low:.3f}, {share.high:.3f}]. Run more rounds"
