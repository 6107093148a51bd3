"""SequenceIndex finds stored sequences by how they begin, and the stored sequence that is nearest to a given one.

Sequences are the bytes of their tokens, as the wire's token digest reads them: little-endian int64. Sorted bytes have
all sequences that begin alike beside each other, so two binary searches answer every question.
"""

from __future__ import annotations

import bisect

import numpy as np

TOKEN_BYTES = 8


class SequenceIndex:
    """Holds the bytes of sequences in sorted order."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def add(self, sequence: bytes) -> None:
        """Add a sequence that is not in the index yet."""
        bisect.insort(self._sorted, sequence)

    def remove(self, sequence: bytes) -> None:
        """Remove a sequence that is in the index."""
        del self._sorted[bisect.bisect_left(self._sorted, sequence)]

    def beginning_with(self, start: bytes) -> list[bytes]:
        """Return all stored sequences that begin with `start`, `start` itself included."""
        first = bisect.bisect_left(self._sorted, start)
        last = first
        while last < len(self._sorted) and self._sorted[last].startswith(start):
            last += 1
        return self._sorted[first:last]

    def longest_beginning_of(self, sequence: bytes) -> bytes | None:
        """Return the longest stored sequence with which `sequence` begins; None if there is none."""
        while sequence:
            place = bisect.bisect_right(self._sorted, sequence)
            if not place:
                return None
            before = self._sorted[place - 1]
            if sequence.startswith(before):
                return before
            # A stored beginning is no longer than what both share: else it would stand between them in the order.
            sequence = sequence[: common_tokens(before, sequence) * TOKEN_BYTES]
        return None

    def nearest_to(self, sequence: bytes) -> tuple[bytes, int] | None:
        """Return the stored sequence that shares the most first tokens with `sequence`, and how many; None if empty."""
        place = bisect.bisect_left(self._sorted, sequence)
        beside = self._sorted[max(0, place - 1) : place + 1]
        shared = [(common_tokens(one, sequence), one) for one in beside]
        count, found = max(shared, default=(0, None), key=lambda pair: pair[0])
        return None if found is None else (found, count)


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many first tokens two sequences share."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    differs = tokens_of(one)[:length] != tokens_of(other)[:length]
    return int(differs.argmax()) if differs.any() else length


def tokens_of(sequence: bytes) -> np.ndarray:
    """Return the tokens of a sequence of the index, int64 and read-only."""
    return np.frombuffer(sequence, "<i8")
