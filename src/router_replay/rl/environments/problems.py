"""Derive the operands of a problem from a hash of its number, so that every rank and every restart gets the same ones.

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
    """Ask problems about numbers of `digits` digits, without a last one. Subclasses define `environment`."""

    def __init__(self, tokenizer: Any, digits: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.digits = digits
        self.seed = seed
        self.end = end_of_sequence(tokenizer)

    @property
    def digest(self) -> str:
        """Return a text with the kind of problems, the digits and the seed."""
        return f"{type(self).__name__} of {self.digits} digits, seed {self.seed}"

    def prompt_lengths(self) -> Iterable[tuple[str, int]]:
        """Return the lengths of a few prompts: all numbers have equally many digits, so the others hardly differ."""
        return [(f"problem {number}", len(self.environment().reset(number))) for number in range(KNOWN_PROMPTS)]


def operands(seed: int, problem: int, count: int, digits: int) -> tuple[int, ...]:
    """Return `count` numbers of exactly `digits` digits, the same ones for the same `seed` and `problem`."""
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    values = 10**digits - lowest
    numbers = []
    for position in range(count):
        # 64 bits more than the range needs, so that all remainders are almost equally likely.
        size = min(64, (values.bit_length() + 64 + 7) // 8)
        digest = hashlib.blake2b(f"{seed}/{problem}/{position}".encode(), digest_size=size).digest()
        numbers.append(lowest + int.from_bytes(digest) % values)
    return tuple(numbers)
