"""An environment that a model with random weights can be trained in: its rewards differ, and its lengths have a tail.

    environment.kind = "bench.random_lengths:RandomLengths"
    environment.arguments.vocabulary = 256

A problem is a few random tokens. The reward is the share of even token ids in the answer, so the episodes of a group
hardly ever get the same reward. The model ends an answer by the end of sequence, which one from
`bench.train_gpu.make_model(..., vocabulary=...)` samples with the same probability at every token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from router_replay.rl.environments import Task, Turn


class RandomLengths(Task):
    """Ask with `length` random tokens of the first `vocabulary`, without the padding and the end of sequence."""

    max_turns: ClassVar[int | None] = 1

    def __init__(self, tokenizer: Any, seed: int, *, vocabulary: int, length: int = 16) -> None:
        self.seed, self.length = seed, length
        special = {tokenizer.pad_token_id, tokenizer.eos_token_id}
        self.tokens = [token for token in range(vocabulary) if token not in special]

    def environment(self) -> RandomLengthsEnvironment:
        """Return a new environment, for one episode."""
        return RandomLengthsEnvironment(self)


class RandomLengthsEnvironment:
    """Reward the share of even token ids."""

    def __init__(self, task: RandomLengths) -> None:
        self._task = task

    def reset(self, problem: int) -> tuple[int, ...]:
        """Return the prompt of this problem number."""
        drawn = random.Random(f"{self._task.seed} {problem}")
        return tuple(drawn.choices(self._task.tokens, k=self._task.length))

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Reward the answer and end the episode."""
        even = sum(token % 2 == 0 for token in token_ids)
        return Turn(reward=even / max(1, len(token_ids)))
