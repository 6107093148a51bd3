"""The additions of the arithmetic environment, with a reward that a model with random weights gets half of the time.

    environment.kind = "bench.even_sums:EvenSums"

Such a model never answers right, so that all rewards of a group would be equal and nothing would be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_replay.rl.environments import Turn
from router_replay.rl.environments.arithmetic import ArithmeticEnvironment, ArithmeticTask


def even_sum(token_ids: Sequence[int]) -> float:
    """Return 1.0 if the sum of the token ids is even, otherwise 0.0."""
    return float(sum(token_ids) % 2 == 0)


class EvenSums(ArithmeticTask):
    """Ask for the sum of two operands of two digits."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        super().__init__(tokenizer, 2, seed)

    def environment(self) -> EvenSumsEnvironment:
        """Return a new environment, for one episode."""
        return EvenSumsEnvironment(self)


class EvenSumsEnvironment(ArithmeticEnvironment):
    """Reward the sum of the token ids, whatever they say."""

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Reward the answer and end the episode."""
        return Turn(reward=even_sum(token_ids))
