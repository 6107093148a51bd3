"""The geometry of a seekable payload: which rows and layers lie in which bytes.

The stored rows are cut into blocks of `block_rows` rows, and the layers into groups. A chunk is one group of layers of
one block, and has a checksum of its own:

    block 0, group 0 | block 0, group 1 | ... | block 1, group 0 | ...

Both sizes follow from the spec alone, so there is one way to write given routes. They are chosen so that a chunk holds
at least 4,096 bytes of raw ids if its block is full, and a checksum adds little. Codec `dense` has one group, so that
its rows stay in order. Codec `sets` stores the captured rows only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from router_replay import kernel
from router_replay.spec import RouterSpec

LEAST_ROWS = 256  # of a full block; a multiple of 8, so that all its chunks end on byte boundaries
LEAST_BYTES = 4096  # of raw ids in a chunk of a full block


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a payload of `rows` stored rows of the model of `spec`, written with `codec`."""

    spec: RouterSpec
    codec: str
    rows: int

    @functools.cached_property
    def block_rows(self) -> int:
        """The number of rows of a full block: 256 times a power of two."""
        rows = LEAST_ROWS
        while rows * self.spec.row_bytes < LEAST_BYTES:
            rows *= 2
        return rows

    @functools.cached_property
    def groups(self) -> list[range]:
        """The layer columns of each group."""
        layers = size = len(self.spec.layers)
        if self.codec == "sets":
            size = -(-LEAST_BYTES * layers // (self.block_rows * self.spec.row_bytes))
        return [range(first, min(first + size, layers)) for first in range(0, layers, size)]

    @property
    def blocks(self) -> int:
        """The number of blocks, of which the last may have fewer rows."""
        return -(-self.rows // self.block_rows)

    @property
    def count(self) -> int:
        """The number of chunks."""
        return self.blocks * len(self.groups)

    @property
    def payload_length(self) -> int:
        """The number of payload bytes."""
        full, rest = divmod(self.rows, self.block_rows)
        return self.offset(full) + self._ends(rest)[-1]

    def rows_of(self, block: int) -> int:
        """Return the number of rows of this block."""
        return min(self.block_rows, self.rows - block * self.block_rows)

    def offset(self, block: int) -> int:
        """Return the position of this block in the payload."""
        return block * self._full_ends[-1]

    def spans(self, block: int) -> list[tuple[int, int]]:
        """Return the (start, end) in the payload of every chunk of this block."""
        base = self.offset(block)
        ends = self._full_ends if self.rows_of(block) == self.block_rows else self._ends(self.rows_of(block))
        return [(base + start, base + end) for start, end in itertools.pairwise((0, *ends))]

    @functools.cached_property
    def _full_ends(self) -> list[int]:
        return self._ends(self.block_rows)

    def _ends(self, rows: int) -> list[int]:
        """Return the position in its block at which each chunk ends, for a block of `rows` rows."""
        spec = self.spec
        if self.codec == "dense":
            return [rows * spec.row_bytes]
        width = kernel.rank_bits(spec.num_experts, spec.top_k)
        return list(itertools.accumulate((rows * len(group) * width + 7) // 8 for group in self.groups))
