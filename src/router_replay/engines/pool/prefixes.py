"""Remembers which engine of a pool computed a prompt, so that its next turn finds the prefix cache there.

A conversation needs no key: its next prompt begins with the tokens of its last turn. Prompts are compared by blocks, as
prefix caches do; the digest of a block includes all blocks before it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

BLOCK = 32  # tokens
MOST_BLOCKS = 1 << 18  # that are remembered, about 40 MB


class PrefixMap:
    """Maps the beginnings of prompts to the name of the engine that computed them last. Not thread-safe."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._engines: collections.OrderedDict[int, str] = collections.OrderedDict()

    def find(self, tokens: Sequence[int] | np.ndarray) -> str | None:
        """Return the engine of the longest known beginning of `tokens`; None if no block of it is known."""
        found = None
        for digest in _digests(tokens):
            if digest not in self._engines:
                break
            found = self._engines[digest]
        return found

    def remember(self, tokens: Sequence[int] | np.ndarray, engine: str) -> None:
        """Remember that this `engine` has computed `tokens`."""
        for digest in _digests(tokens):
            self._engines[digest] = engine
            self._engines.move_to_end(digest)
        while len(self._engines) > self._most:
            self._engines.popitem(last=False)


def _digests(tokens: Sequence[int] | np.ndarray) -> Iterator[int]:
    """Yield a digest for each whole block, over all tokens up to its end."""
    if len(tokens) < BLOCK:
        return
    data = np.asarray(tokens, "<i8").tobytes()
    digest = 0
    for start in range(0, len(data) - 8 * BLOCK + 1, 8 * BLOCK):
        digest = xxhash.xxh3_64_intdigest(data[start : start + 8 * BLOCK], seed=digest)
        yield digest
