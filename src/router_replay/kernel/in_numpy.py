"""The kernel without a compiler: the same functions and bytes as _compiled.c, with NumPy and Python integers.

Ranks of up to 128 bits use tables of two 64-bit halves, so the loops run over slots and not
over sets. Wider ranks (no current model has them) are computed with exact Python integers, set by set.

Shapes: N sets, K slots. Table columns are d = c - i, as in _compiled.c.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import xxhash

TABLE_BITS = 128  # ranks up to this width use tables
CACHED_BYTES = 1 << 19  # the size of a piece that stays in the cache between the check and the hash
CHUNK = 1 << 14  # sets processed at a time: keeps the unpacked bits of a chunk in the cache


@functools.lru_cache(maxsize=64)
def set_count(num_experts: int, k: int) -> int:
    """Return the number of possible sets: C(num_experts, k)."""
    return math.comb(num_experts, k)


def rank_bits(num_experts: int, k: int) -> int:
    """Return the bits of a rank: ceil(log2 C(num_experts, k)), which is 0 if there is only one set."""
    return (set_count(num_experts, k) - 1).bit_length()


def least_rank_bits(num_experts: int, k: int) -> int:
    """Return a lower bound of `rank_bits`, at least half of it, without computing C(num_experts, k).

    C(E, m) >= (E / m)^m, and C(E, k) = C(E, E - k).
    """
    few = min(k, num_experts - k)
    return max(0, math.floor(few * math.log2(num_experts / few)) - 1) if few else 0


def first_bad_set(ids_NK: np.ndarray, num_experts: int) -> int:
    """Return the index of the first set with an id out of range or a repeated id; -1 if all are good."""
    if not ids_NK.size:
        return -1
    ordered_NK = np.sort(ids_NK, axis=1)
    bad_N = (ordered_NK[:, 1:] == ordered_NK[:, :-1]).any(axis=1) | (ordered_NK[:, -1] >= num_experts)
    return int(np.argmax(bad_N)) if bad_N.any() else -1


def hash_and_check(data: memoryview, offset: int, k: int, num_experts: int, dtype: np.dtype) -> tuple[int, int]:
    """Check and then hash each piece while it is in the cache: two passes over memory cost more than a copy."""
    ids_NK = np.frombuffer(data[offset:], dtype).reshape(-1, k)
    checksum = xxhash.xxh3_64(data[:offset])
    piece = max(CACHED_BYTES // (k * dtype.itemsize), 1)
    bad = -1
    for first in range(0, len(ids_NK), piece):
        if bad < 0:
            found = first_bad_set(ids_NK[first : first + piece], num_experts)
            bad = first + found if found >= 0 else -1
        at = offset + first * k * dtype.itemsize
        checksum.update(data[at : at + piece * k * dtype.itemsize])
    return checksum.intdigest(), bad


def sort_sets(ids: np.ndarray) -> np.ndarray:
    """Sort each set in ascending order."""
    return np.sort(ids, axis=-1)


def encode(ids_NK: np.ndarray, num_experts: int, out: np.ndarray) -> int:
    """Fill `out` with the packed ranks; returns the index of the first bad set, or -1."""
    bad = first_bad_set(ids_NK, num_experts)
    if bad >= 0:
        return bad
    k = ids_NK.shape[1]
    width = rank_bits(num_experts, k)
    if not width:
        return -1
    for start, stop, piece in _chunks(len(ids_NK), width):
        sorted_NK = np.sort(ids_NK[start:stop], axis=1)
        rank_bytes = _rank(sorted_NK, num_experts) if width <= TABLE_BITS else _rank_wide(sorted_NK, num_experts, width)
        bits_NW = np.unpackbits(rank_bytes, axis=1, bitorder="little")[:, :width]
        out[piece] = np.packbits(bits_NW, bitorder="little")
    return -1


def decode(payload: np.ndarray, num_experts: int, out_NK: np.ndarray) -> int:
    """Fill `out_NK` with the sets, each ascending; returns the index of the first rank that is too large, or -1."""
    count, k = out_NK.shape
    width = rank_bits(num_experts, k)
    if not width:
        out_NK[:] = np.arange(k)
        return -1
    for start, stop, piece in _chunks(count, width):
        bits_NW = np.unpackbits(payload[piece], bitorder="little", count=(stop - start) * width).reshape(-1, width)
        padded_bits = 128 if width <= TABLE_BITS else -(-width // 8) * 8
        bits_NW = np.pad(bits_NW, ((0, 0), (0, padded_bits - width)))
        rank_bytes = np.packbits(bits_NW, axis=1, bitorder="little")
        unrank = _unrank if width <= TABLE_BITS else _unrank_wide
        bad = unrank(rank_bytes, num_experts, out_NK[start:stop])
        if bad >= 0:
            return start + bad
    return -1


def _chunks(count: int, width: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (start, stop, byte slice) of each chunk; chunks are whole bytes, since CHUNK is a multiple of 8."""
    for start in range(0, count, CHUNK):
        stop = min(count, start + CHUNK)
        yield start, stop, slice(start * width // 8, (stop * width + 7) // 8)


# -- ranks of up to 128 bits: tables ----------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _tables(num_experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return C(d + i, i + 1) as low and high halves [K, E - K + 2]; each row is the running sum of the one above."""
    columns = num_experts - k + 2
    low, high = np.zeros((2, k, columns), np.uint64)
    low[0] = np.arange(columns)
    for i in range(1, k):
        np.cumsum(low[i - 1], out=low[i])
        wrapped = low[i, 1:] < low[i, :-1]  # a running sum that decreased has overflowed by one
        high[i] = np.cumsum(high[i - 1])
        high[i, 1:] += np.cumsum(wrapped, dtype=np.uint64)
    return low, high


def _rank(sorted_NK: np.ndarray, num_experts: int) -> np.ndarray:
    """Return the ranks as 16 little-endian bytes each."""
    count, k = sorted_NK.shape
    low_table, high_table = _tables(num_experts, k)
    rank = np.zeros((count, 2), "<u8")
    low, high = rank[:, 0], rank[:, 1]
    for i in range(k):
        column = sorted_NK[:, i].astype(np.intp) - i
        added = low_table[i][column]
        low += added
        high += high_table[i][column] + (low < added)
    return rank.view(np.uint8)


def _unrank(rank_bytes: np.ndarray, num_experts: int, out_NK: np.ndarray) -> int:
    k = out_NK.shape[1]
    low_table, high_table = _tables(num_experts, k)
    rank = rank_bytes.view("<u8").astype(np.uint64)
    low, high = rank[:, 0].copy(), rank[:, 1].copy()
    too_great = _reaches(low, high, low_table[-1, -1], high_table[-1, -1])
    if too_great.any():
        return int(np.argmax(too_great))
    for i in range(k - 1, -1, -1):
        low_row, high_row = low_table[i], high_table[i]
        if not high_row[-1]:
            column = np.searchsorted(low_row, low, side="right") - 1
        else:
            column = _search_wide(low, high, low_row, high_row)
        high -= high_row[column] + (low < low_row[column])
        low -= low_row[column]
        out_NK[:, i] = column + i
    return -1


def _search_wide(low: np.ndarray, high: np.ndarray, low_row: np.ndarray, high_row: np.ndarray) -> np.ndarray:
    """Return the last column whose entry is <= the rank, by bisection: NumPy has no 128-bit searchsorted."""
    column = np.zeros(len(low), np.intp)
    step = 1 << (len(low_row) - 1).bit_length()
    while step := step // 2:
        there = np.minimum(column + step, len(low_row) - 1)
        column = np.where(_reaches(low, high, low_row[there], high_row[there]), there, column)
    return column


def _reaches(low: np.ndarray, high: np.ndarray, low_bound: np.ndarray, high_bound: np.ndarray) -> np.ndarray:
    return (high > high_bound) | ((high == high_bound) & (low >= low_bound))


# -- wider ranks: Python integers -------------------------------------------------------------------


def _rank_wide(sorted_NK: np.ndarray, num_experts: int, width: int) -> np.ndarray:
    size = -(-width // 8)
    ranks = bytearray()
    for experts in sorted_NK.tolist():
        rank, left, binomial = 0, len(experts), math.comb(num_experts - 1, len(experts))
        for expert in range(num_experts - 1, -1, -1):  # binomial is always C(expert, left)
            if experts[left - 1] == expert:
                rank += binomial
                binomial, left = binomial * left // max(expert, 1), left - 1
                if not left:
                    break
            else:
                binomial = binomial * (expert - left) // expert
        ranks += rank.to_bytes(size, "little")
    return np.frombuffer(ranks, np.uint8).reshape(-1, size)


def _unrank_wide(rank_bytes: np.ndarray, num_experts: int, out_NK: np.ndarray) -> int:
    k = out_NK.shape[1]
    total, greatest = set_count(num_experts, k), math.comb(num_experts - 1, k)
    for number, row in enumerate(rank_bytes):
        rank, left, binomial = int.from_bytes(row.tobytes(), "little"), k, greatest
        if rank >= total:
            return number
        for expert in range(num_experts - 1, -1, -1):  # binomial is always C(expert, left)
            if rank >= binomial:
                left -= 1
                out_NK[number, left] = expert
                if not left:
                    break
                rank -= binomial
                binomial = binomial * (left + 1) // max(expert, 1)
            else:
                binomial = binomial * (expert - left) // expert
    return -1
