"""Finds the least busy of many engines without looking at all of them for every request.

loads = Loads(["a", "b"])
loads.least()      # ("a", 0): the key, and its samples in flight
loads.add("a", 4)  # a request of 4 samples
loads.least()      # ("b", 0)
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Loads(Generic[K]):
    """Counts the samples in flight of each key.

    Among equal ones, the key that was given a request longest ago is first. A heap has an entry for every change; an
    entry is valid if it is the last one of its key. Not thread-safe.
    """

    def __init__(self, keys: Iterable[K]) -> None:
        self._clock = 0
        self._now: dict[K, tuple[int, int, int]] = {key: (0, number, number) for number, key in enumerate(keys)}
        self._keys = list(self._now)
        self._heap = list(self._now.values())

    def of(self, key: K) -> int:
        """Return the samples in flight of `key`."""
        return self._now[key][0]

    def add(self, key: K, samples: int) -> None:
        """Count `samples` more for `key`; fewer if negative."""
        running, used, number = self._now[key]
        if samples > 0:
            self._clock += 1
            used = len(self._keys) + self._clock
        entry = self._now[key] = (running + samples, used, number)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 8 * len(self._keys) + 64:
            self._heap = list(self._now.values())
            heapq.heapify(self._heap)

    def least(self) -> tuple[K, int]:
        """Return the least busy key, and its samples in flight."""
        while True:
            running, used, number = self._heap[0]
            key = self._keys[number]
            if self._now[key] == (running, used, number):
                return key, running
            heapq.heappop(self._heap)
