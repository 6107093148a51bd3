"""Count the host memory that weights take on their way, beside the shards that a rank keeps.

    with measured() as held:
        policy moves its weights somewhere
    held.most       # the most bytes of whole tensors and pieces that were alive at one time
    held.total      # the bytes of all of them together

Every tensor that is gathered, cast or read for a moment passes through `counted`. Nothing is counted outside the block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator

import torch


@dataclasses.dataclass
class Held:
    """Bytes of counted tensors: alive `now`, the `most` at one time, and in `total`."""

    now: int = 0
    most: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # an engine reads weights in a thread of its own
        self._seen: set[int] = set()

    def take(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed. A storage that is alive is counted once."""
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
            self.now += size
            self.total += size
            self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)  # views of a tensor keep its storage

    def _free(self, key: int, size: int) -> None:
        with self._lock:
            self._seen.discard(key)
            self.now -= size


_measuring: list[Held] = []


@contextlib.contextmanager
def measured() -> Iterator[Held]:
    """Count the tensors of the block."""
    held = Held()
    _measuring.append(held)
    try:
        yield held
    finally:
        _measuring.remove(held)


def counted(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, a copy that exists for a moment, after adding its bytes to every `measured` block."""
    for held in _measuring:
        held.take(tensor.untyped_storage())
    return tensor
