"""The loops over single sets of experts: compiled if the extension is installed, in NumPy otherwise.

Both implementations return the same values and the same bytes. A set is one row of an [N, K] array of ids. `COMPILED`
says which implementation is in use; ROUTER_REPLAY_NO_KERNEL=1 in the environment selects NumPy.

    encode_sets(np.array([[5, 0], [2, 7]], np.uint8), 8)   ->   ea 02: the ranks 10 and 23, 5 bits each
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from router_replay.kernel import in_numpy
from router_replay.kernel.in_numpy import TABLE_BITS, least_rank_bits, rank_bits

__all__ = ["COMPILED", "BadRank", "decode_sets", "encode_sets", "first_bad_set", "hash_and_check", "least_rank_bits"]
__all__ += ["rank_bits", "simd_level", "sort_sets", "unranking_steps"]

SHORT_HASH = 240  # XXH3 uses another algorithm up to this length; the compiled kernel has only the one for longer input
WIDE_STEP = 16  # the cost of one step with a long integer, in table steps
WIDE_BITS = 512  # the cost of a step grows by one WIDE_STEP for each WIDE_BITS bits of the rank


def _load() -> Any:
    """Import the compiled kernel; None if the package was installed without a compiler or NumPy is requested."""
    if os.environ.get("ROUTER_REPLAY_NO_KERNEL") == "1":
        return None
    try:
        return importlib.import_module("router_replay.kernel._compiled")
    except ImportError:
        return None


_compiled: Any = _load()
COMPILED: bool = _compiled is not None


class BadRank(ValueError):
    """A rank does not encode any set; `number` is the index of the set."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle both arguments: an exception is restored from its `args`, which hold only the message."""
        return type(self), (self.number, str(self))


def first_bad_set(ids_NK: np.ndarray, num_experts: int) -> int:
    """Return the index of the first set with an id out of range or a repeated id; -1 if all are good."""
    if _compiled is None or not _is_narrow(ids_NK):
        return in_numpy.first_bad_set(ids_NK, num_experts)
    return _compiled.check(np.ascontiguousarray(ids_NK), ids_NK.itemsize, ids_NK.shape[1], num_experts)


def hash_and_check(data: memoryview, offset: int, k: int, num_experts: int, dtype: np.dtype) -> tuple[int, int]:
    """Hash and check `data` in one pass.

    Returns the XXH3-64 of `data`, and the index of the first bad set among the ids that begin at `offset`, or -1.
    """
    if _compiled is None or len(data) <= SHORT_HASH or not dtype.isnative:
        return in_numpy.hash_and_check(data, offset, k, num_experts, dtype)
    return _compiled.hash_check(data, offset, dtype.itemsize, k, num_experts)


def sort_sets(ids: np.ndarray) -> np.ndarray:
    """Sort each set in ascending order, so that two sets can be compared."""
    if _compiled is None or not _is_narrow(ids):
        return in_numpy.sort_sets(ids)
    ordered = np.array(ids, order="C")
    _compiled.sort(ordered, ids.itemsize, ids.shape[-1])
    return ordered


def encode_sets(ids_NK: np.ndarray, num_experts: int, threads: int = 1) -> np.ndarray:
    """Pack the ranks of all sets into one little-endian bit stream; the last byte is padded with zeros."""
    count, k = ids_NK.shape
    width = rank_bits(num_experts, k)
    out = np.empty(_packed_size(count, width), np.uint8)

    def encode(start: int, stop: int) -> int:
        return _encode(ids_NK[start:stop], num_experts, out[_bytes_of(start, stop, width)])

    bad = _in_threads(encode, count, threads)
    if bad >= 0:
        raise ValueError(f"set {bad}: expected different experts in [0, {num_experts}), got {ids_NK[bad].tolist()}")
    return out


def decode_sets(buffer: Any, count: int, k: int, num_experts: int, dtype: np.dtype, threads: int = 1) -> np.ndarray:
    """Unpack a bit stream into its sets [count, k], each ascending. Raises ValueError if the bytes are invalid."""
    payload = np.frombuffer(buffer, np.uint8)
    width = rank_bits(num_experts, k)
    if len(payload) != _packed_size(count, width):
        expected = _packed_size(count, width)
        raise ValueError(f"expected {expected} bytes for {count} ranks of {width} bits, got {len(payload)}")
    if count * width % 8 and payload[-1] >> (count * width % 8):
        raise ValueError(f"the bits after the last of {count} ranks of {width} bits must be zero")
    ids_NK = np.empty((count, k), dtype)

    def decode(start: int, stop: int) -> int:
        return _decode(payload[_bytes_of(start, stop, width)], num_experts, ids_NK[start:stop])

    bad = _in_threads(decode, count, threads)
    if bad >= 0:
        raise BadRank(bad, f"the rank of set {bad} must be below C({num_experts}, {k}), got a larger one")
    return ids_NK


def unranking_steps(count: int, k: int, num_experts: int) -> int:
    """Return the cost of `decode_sets` in steps: a step is one slot of one set, about 5 ns in C and 20 ns in NumPy.

    A rank that is too wide for the tables takes a step per expert instead of per slot, with integers of its width.
    """
    if not count:
        return 0
    width = rank_bits(num_experts, k)
    if width <= TABLE_BITS:
        return count * k
    return count * num_experts * WIDE_STEP * (1 + width // WIDE_BITS)


def simd_level(most: int) -> int:
    """Limit the compiled kernel to AVX-512 (2), AVX2 (1) or neither (0); returns the level in use. For tests."""
    return _compiled.simd(most)


def _encode(ids_NK: np.ndarray, num_experts: int, out: np.ndarray) -> int:
    tables = _tables(num_experts, ids_NK.shape[1]) if _compiled is not None and _is_narrow(ids_NK) else None
    if tables is None:
        return in_numpy.encode(ids_NK, num_experts, out)
    return _compiled.rank(tables, np.ascontiguousarray(ids_NK), ids_NK.itemsize, out)


def _decode(payload: np.ndarray, num_experts: int, out_NK: np.ndarray) -> int:
    tables = _tables(num_experts, out_NK.shape[1]) if _compiled is not None and _is_narrow(out_NK) else None
    if tables is None:
        return in_numpy.decode(payload, num_experts, out_NK)
    return _compiled.unrank(tables, payload, out_NK.itemsize, out_NK)


@functools.lru_cache(maxsize=16)
def _tables(num_experts: int, k: int) -> Any:
    """Return the compiled kernel's tables for one model, built at first use in about 1 ms; None for wide ranks."""
    return _compiled.plan(num_experts, k) if rank_bits(num_experts, k) <= TABLE_BITS else None


def _is_narrow(ids: np.ndarray) -> bool:
    """Return whether the compiled kernel can read this array: one or two bytes per id, in native byte order."""
    return ids.size > 0 and ids.dtype in (np.uint8, np.uint16) and ids.dtype.isnative


def _packed_size(count: int, width: int) -> int:
    return (count * width + 7) // 8


def _bytes_of(start: int, stop: int, width: int) -> slice:
    return slice(start * width // 8, _packed_size(stop, width))


def _in_threads(work: Callable[[int, int], int], count: int, threads: int) -> int:
    """Call work(start, stop) over all sets, in threads; returns the first bad set that it reports, or -1.

    Pieces are multiples of 64 sets, so that their bit streams meet on byte boundaries.
    """
    piece = -(-count // (64 * max(threads, 1))) * 64
    if threads <= 1 or count <= 64 * threads:
        return work(0, count)
    starts = range(0, count, piece)
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda start: work(start, min(count, start + piece)), starts))
    return next((start + bad for start, bad in zip(starts, results, strict=True) if bad >= 0), -1)
