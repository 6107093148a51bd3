"""LocalBatch: one rank's part of a packed batch, from `pack` to the routers.

    for whole in pack(samples, max_tokens).bins():
        for rank, local in enumerate(whole.split(ranks)):
            ...                                      # send `local` to its rank

    with replayer.replay(local):                     # on that rank
        found = logprobs(model, local)

A loss over sequences needs the tokens of all slots; the routers need only the rows of this rank's slots. A LocalBatch
holds exactly these two.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from router_replay.batch.spans import RowSpans
from router_replay.errors import BatchError
from router_replay.routes import Routes

if TYPE_CHECKING:
    from router_replay.batch.tensors import LocalTensors
    from router_replay.batch.types import Batch


@dataclasses.dataclass(frozen=True, eq=False)
class LocalBatch:
    """One rank's part of a bin: the tokens of all slots, and the rows of this rank's slots.

    `whole` has the tokens of every slot and no rows; `routes` has one row for each of `slots`, or is None. `len()`,
    `labels`, `label_mask` and `routes` cover this rank's slots. Rows that lie in a store (RowSpans) are read when their
    tensors are made. Tensors are cached: passes on the same device share one copy, so drop the batch after its last
    pass.
    """

    whole: Batch
    slots: np.ndarray
    routes: Routes | RowSpans | None

    def __post_init__(self) -> None:
        if self.whole.routes is not None:
            raise BatchError("`whole` of a LocalBatch must have routes=None; make a LocalBatch with Batch.split")
        if self.routes is not None and len(self.routes) != len(self.slots):
            raise BatchError(f"routes must have one row per slot: expected {len(self.slots)}, got {len(self.routes)}")

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def place(self) -> slice | np.ndarray:
        """The index that selects this rank's part of an array over all slots; a slice, giving a view, if possible."""
        return as_slice(self.slots)

    @property
    def labels(self) -> np.ndarray:
        """The token that each of this rank's slots predicts; NO_LABEL for none."""
        return self.whole.labels[self.place]

    @property
    def label_mask(self) -> np.ndarray:
        """True for each of this rank's slots whose label is part of the loss."""
        return self.whole.label_mask[self.place]

    def to_torch(self, device: Any = "cpu") -> LocalTensors:
        """Return this batch on `device`. Later calls return the same object; it copies an array on its first use."""
        from router_replay.batch.tensors import LocalTensors, torch_device

        key = torch_device(device)
        if key not in self._tensors:
            self._tensors[key] = LocalTensors(self, key)
        return self._tensors[key]

    @functools.cached_property
    def _tensors(self) -> dict[Any, LocalTensors]:
        return {}


def as_slice(index: np.ndarray) -> slice | np.ndarray:
    """Convert an index of consecutive numbers to a slice, which makes a view instead of a copy."""
    if not len(index):
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    consecutive = last - first + 1 == len(index) and bool((np.diff(index) == 1).all())
    return slice(first, last + 1) if consecutive else index
