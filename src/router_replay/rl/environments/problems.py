"""The operands of a problem come from a hash of its number, so that any rank and any restart sees the same problems.

operands(seed=0, problem=7, count=2, digits=2)       # (57, 34), always
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from router_replay.rl.environments.base import Task
from router_replay.rl.environments.text import end_of_sequence

KNOWN_PROMPTS = 16


class NumbersTask(Task):
    """Endless problems about numbers of `digits` digits. Each task of this kind defines `environment`."""

    def __init__(self, tokenizer: Any, digits: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.digits = digits
        self.seed = seed
        self.end = end_of_sequence(tokenizer)

    @property
    def digest(self) -> str:
        return f"{type(self).__name__} of {self.digits} digits, seed {self.seed}"

    def prompt_lengths(self) -> Iterable[tuple[str, int]]:
        """The lengths of a few prompts: all numbers have the same digits, so the others hardly differ."""
        return [(f"problem {number}", len(self.environment().reset(number))) for number in range(KNOWN_PROMPTS)]


def operands(seed: int, problem: int, count: int, digits: int) -> tuple[int, ...]:
    """`count` numbers of exactly `digits` digits, the same ones for the same seed and problem."""
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    values = 10**digits - lowest
    numbers = []
    for position in range(count):
        # 64 bits more than the range needs, so that the remainder is as good as even.
        size = min(64, (values.bit_length() + 64 + 7) // 8)
        digest = hashlib.blake2b(f"{seed}/{problem}/{position}".encode(), digest_size=size).digest()
        numbers.append(lowest + int.from_bytes(digest) % values)
    return tuple(numbers)
