"""Batch: the arrays of packed sequences, all in the same slot order.

Two samples, [5, 6, 7] and [8, 9], packed into one bin padded to multiples of 4:

    slot          0  1  2  3 | 4  5  6  7
    token_ids     5  6  7  0 | 8  9  0  0
    position_ids  0  1  2  3 | 0  1  2  3
    labels        6  7  .  . | 9  .  .  .        the token that the slot predicts; NO_LABEL for none
    sample_ids    0  0  0 -1 | 1  1 -1 -1
    cu_seqlens    0            4           8

Tokens and rows have the same order. `loss_mask`, `logprobs`, `advantages` and `versions` describe the token in
the slot; `label_mask`, `label_logprobs` and so on describe the token that the slot predicts,
which is what a loss needs and what stays correct when the slots are spread over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from router_replay.batch.local import LocalBatch, as_slice
from router_replay.batch.sharding import ShardKind, checked_rank, shard_index
from router_replay.batch.spans import RowSpans
from router_replay.errors import BatchError
from router_replay.routes import Routes

if TYPE_CHECKING:
    from router_replay.batch.tensors import TensorBatch

NO_LABEL = -100
PER_SLOT = (
    "token_ids", "position_ids", "sample_ids", "loss_mask", "logprobs", "advantages", "versions",
    "labels", "label_mask", "label_logprobs", "label_advantages", "label_versions",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Packed sequences. A batch of several bins is their concatenation; `bins()` yields them one by one.

    These arrays are [slots]:

    - `token_ids`: the tokens, `pad_token_id` in padding.
    - `position_ids`: the position in the sequence, from 0 on; padding continues the count.
    - `sample_ids`: the number of the sample in the list that was packed, -1 in padding.
    - `loss_mask`, `logprobs`, `advantages`: those of the token in the slot; False or 0.0 in padding.
    - `versions`: the policy version that sampled the token in the slot; it has no meaning without `loss_mask`.
    - `labels`: the token that the slot predicts, NO_LABEL for none.
    - `label_mask`, `label_logprobs`, `label_advantages`, `label_versions`: those of the token that the slot predicts.
    - `slots`: the numbers of these slots in the whole batch.

    `routes` has one row per slot, or is None; they are RowSpans if the rows of a sample lie in a store.
    `cu_seqlens` [sequences + 1] are the sequence boundaries, padding included. `bin_ends` [bins] are the ends of the
    bins. `shard_of` is (rank, size, kind) in a shard, otherwise None. In a shard, `cu_seqlens` still describes the
    whole batch: sequence parallel attention runs on whole sequences.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    sample_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    labels: np.ndarray
    label_mask: np.ndarray
    label_logprobs: np.ndarray
    label_advantages: np.ndarray
    label_versions: np.ndarray
    routes: Routes | RowSpans | None
    cu_seqlens: np.ndarray
    bin_ends: np.ndarray
    slots: np.ndarray
    shard_of: tuple[int, int, ShardKind] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bins(self) -> int:
        """The number of bins."""
        return len(self.bin_ends)

    def bins(self) -> Iterator[Batch]:
        """Yield each bin as a Batch, a micro-batch for gradient accumulation. The arrays are views."""
        self._refuse_shard("bins")
        start = 0
        for end in self.bin_ends.tolist():
            inside = self.cu_seqlens[(self.cu_seqlens >= start) & (self.cu_seqlens <= end)]
            yield self._take(
                slice(start, end),
                cu_seqlens=inside - start,
                bin_ends=np.array([end - start]),
                slots=np.arange(end - start),
            )
            start = end

    def shard(self, rank: int, size: int, kind: ShardKind = "contiguous") -> Batch:
        """Return the slots of `rank` out of `size` ranks, with their labels and rows, copied to new memory.

        The `kind` "contiguous" cuts every bin into `size` equal pieces (Ulysses); "zigzag" cuts every sequence
        into 2 * size pieces, of which rank r takes pieces r and 2 * size - 1 - r (ring attention).
        """
        self._refuse_shard("shard")
        rank, size = checked_rank(rank, size)
        index = shard_index(self.cu_seqlens, self.bin_ends, rank, size, kind)
        return self._take(index, slots=index, bin_ends=self.bin_ends // size, shard_of=(rank, size, kind))

    def split(self, size: int, kind: ShardKind = "contiguous") -> list[LocalBatch]:
        """Return one LocalBatch for each of `size` ranks: the tokens of all slots, and the rows of that rank's slots.

        `kind` is as in `shard`. Nothing is copied if a rank's slots are contiguous.
        """
        self._refuse_shard("split")
        whole = dataclasses.replace(self, routes=None)
        parts = []
        for rank in range(checked_rank(0, size)[1]):
            slots = shard_index(self.cu_seqlens, self.bin_ends, rank, size, kind)
            parts.append(LocalBatch(whole, slots, _rows(self.routes, as_slice(slots))))
        return parts

    def select_layers(self, layers: Sequence[int]) -> Batch:
        """Return the same tokens with the rows of `layers` only (absolute ids), such as those of a pipeline stage."""
        routes = None if self.routes is None else self.routes.read(layers=layers)
        return dataclasses.replace(self, routes=routes)

    def per_sample(self, values: Any) -> list[np.ndarray]:
        """Split `values`, an array over slots, into one array per sample, in the order in which the samples were given.

        Padding is left out.
        """
        values = np.asarray(values)
        if values.shape[:1] != (len(self),):
            raise BatchError(f"values must have one entry per slot: expected {len(self)}, got {list(values.shape)}")
        order = np.argsort(self.sample_ids, kind="stable")
        _, starts = np.unique(self.sample_ids[order], return_index=True)
        pieces = np.split(values[order], starts[1:])
        return pieces[1:] if (self.sample_ids < 0).any() else pieces

    def to_torch(self, device: Any = "cpu") -> TensorBatch:
        """Return tensors with the same names on `device`; ids stay one or two bytes each."""
        from router_replay.batch.tensors import TensorBatch

        return TensorBatch.from_batch(self, device)

    def _take(self, index: np.ndarray | slice, **changes: Any) -> Batch:
        """Return the slots at `index`, with `changes` applied; a slice makes views, an array makes copies."""
        fields = {name: getattr(self, name)[index] for name in PER_SLOT}
        return dataclasses.replace(self, **fields, routes=_rows(self.routes, index), **changes)

    def _refuse_shard(self, what: str) -> None:
        if self.shard_of is not None:
            rank, size, kind = self.shard_of
            raise BatchError(
                f"{what}() needs the whole batch, got a shard ({kind}, rank {rank} of {size}): call it before shard()"
            )


def _rows(routes: Routes | RowSpans | None, index: np.ndarray | slice) -> Routes | RowSpans | None:
    if routes is None:
        return None
    return routes[index] if isinstance(index, slice) else routes.take(index)
