"""Computes which slots of a packed batch belong to which rank."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from router_replay.arguments import LARGEST, exact_int
from router_replay.errors import BatchError

ShardKind = Literal["contiguous", "zigzag"]


def shard_index(cu_seqlens: np.ndarray, bin_ends: np.ndarray, rank: int, size: int, kind: ShardKind) -> np.ndarray:
    """Return the slots of `rank` out of `size` ranks, in the order in which the rank holds them.

    `cu_seqlens` [sequences + 1] are the sequence boundaries in slots, from 0 on; `bin_ends` [bins] are the ends of the
    bins. `kind` is "contiguous" (every bin is cut into `size` equal pieces) or "zigzag" (every sequence is cut into
    2 * size pieces, of which a rank gets two). Raises BatchError if a length does not divide.

    One sequence of 8 slots over 2 ranks: contiguous gives 0 1 2 3 and 4 5 6 7; zigzag gives
    0 1 6 7 and 2 3 4 5, so that causal attention costs both ranks the same.
    """
    rank, size = checked_rank(rank, size)
    if kind == "contiguous":
        starts = np.concatenate([[0], bin_ends[:-1]])
        return _concatenate([_pieces(a, b, size, f"bin {i}", [rank]) for i, (a, b) in _pairs(starts, bin_ends)])
    if kind == "zigzag":
        mine = [rank, 2 * size - 1 - rank]
        spans = _pairs(cu_seqlens[:-1], cu_seqlens[1:])
        return _concatenate([_pieces(a, b, 2 * size, f"sequence {i}", mine) for i, (a, b) in spans])
    raise BatchError(f"kind must be one of {get_args(ShardKind)}, got {kind!r}")


def checked_rank(rank: int, size: int) -> tuple[int, int]:
    """Return rank and size as Python integers; raise BatchError unless 0 <= rank < size."""
    size = exact_int(size, "size", BatchError, least=1)
    if not 0 <= exact_int(rank, "rank", BatchError, least=-LARGEST) < size:
        raise BatchError(f"rank must lie in [0, size), got rank {rank} of size {size}")
    return int(rank), size


def _pairs(starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(starts.tolist(), ends.tolist(), strict=True)))


def _pieces(start: int, end: int, count: int, name: str, wanted: list[int]) -> np.ndarray:
    length = end - start
    if length % count:
        raise BatchError(
            f"{name} has {length} slots, expected a multiple of {count} to cut it into equal pieces: "
            f"pack with pad_to_multiple_of={count} or a multiple of it"
        )
    piece = length // count
    return _concatenate([np.arange(start + i * piece, start + (i + 1) * piece) for i in wanted])


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
