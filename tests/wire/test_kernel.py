"""Both kernels, the compiled one and NumPy, give the same answers and the same bytes."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given

from router_replay import kernel

SIMD = ("plain", "AVX2", "AVX-512")  # the compiled kernel has a build for each


def kernels() -> list[str]:
    if not kernel.COMPILED:
        return ["numpy"]
    return ["numpy", *SIMD[: kernel.simd_level(2) + 1]]


@contextlib.contextmanager
def numpy_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_compiled", None)
        yield


@pytest.fixture(params=kernels(), scope="module", autouse=True)
def each_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs once with each kernel that this machine can run."""
    if request.param == "numpy":
        with numpy_only():
            yield
        return
    assert kernel.simd_level(SIMD.index(request.param)) == SIMD.index(request.param)
    yield
    kernel.simd_level(2)


# (experts, k): narrow, wide, one set only, one slot, complements, every expert id, above 128 bits
SHAPES = [(8, 2), (128, 8), (256, 8), (384, 8), (512, 10), (512, 22), (64, 6), (1, 1), (5, 5), (2, 1), (128, 120)]
SHAPES += [(131, 65), (132, 66), (600, 300), (512, 40), (65536, 1), (65536, 2), (65536, 7), (65536, 9), (65536, 65530)]
COUNTS = (0, 1, 7, 64, 200)


def dtype_of(experts: int) -> np.dtype:
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


def random_sets(count: int, experts: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = [rng.choice(experts, k, replace=False) for _ in range(count)]
    return np.array(rows, dtype_of(experts)).reshape(count, k)


@pytest.mark.parametrize(("experts", "k"), SHAPES)
def test_round_trip_and_equal_bytes(experts: int, k: int) -> None:
    for count in COUNTS if k < 1000 else (9,):
        ids = random_sets(count, experts, k)
        packed = kernel.encode_sets(ids, experts)
        with numpy_only():
            assert bytes(packed) == bytes(kernel.encode_sets(ids, experts))
        assert len(packed) == (count * kernel.rank_bits(experts, k) + 7) // 8
        unpacked = kernel.decode_sets(packed, count, k, experts, ids.dtype)
        assert unpacked.dtype == ids.dtype
        np.testing.assert_array_equal(unpacked, np.sort(ids, axis=1))


@pytest.mark.parametrize(("experts", "k"), [(7, 3), (9, 1), (6, 5), (12, 6)])
def test_ranks_count_the_sets_in_colexicographic_order(experts: int, k: int) -> None:
    """All sets, by itertools and not by binomials: the n-th one has the rank n."""
    every = sorted(itertools.combinations(range(experts), k), key=lambda experts_of: experts_of[::-1])
    ids = np.array(every, np.uint8)
    width = (len(every) - 1).bit_length()
    stream = sum(rank << (rank * width) for rank in range(len(every)))
    expected = stream.to_bytes((len(every) * width + 7) // 8, "little")
    assert bytes(kernel.encode_sets(ids, experts)) == expected
    np.testing.assert_array_equal(kernel.decode_sets(expected, len(ids), k, experts, ids.dtype), ids)


@pytest.mark.parametrize(("experts", "k"), [(128, 8), (512, 22), (512, 10), (300, 290), (65536, 3), (512, 40)])
def test_extreme_ranks(experts: int, k: int) -> None:
    """The first and last sets sit at the ends of the tables; one past the last is refused by its number."""
    total, width = kernel.in_numpy.set_count(experts, k), kernel.rank_bits(experts, k)
    first, last = np.arange(k), np.arange(experts - k, experts)
    ids = np.array([first, last, first], dtype_of(experts))
    packed = int.from_bytes(bytes(kernel.encode_sets(ids, experts)), "little")
    assert packed == (total - 1) << width
    forged = (total << width).to_bytes((3 * width + 7) // 8, "little")
    with pytest.raises(kernel.BadRank) as error:
        kernel.decode_sets(forged, 3, k, experts, ids.dtype)
    assert error.value.number == 1


def test_a_bad_rank_crosses_a_process_whole() -> None:
    error = pickle.loads(pickle.dumps(kernel.BadRank(3, "the rank of set 3 is not below C(8, 2)")))
    assert (type(error), error.number, str(error)) == (kernel.BadRank, 3, "the rank of set 3 is not below C(8, 2)")


def test_wrong_length_and_padding() -> None:
    packed = bytes(kernel.encode_sets(random_sets(3, 8, 2), 8))  # 15 bits
    for wrong in (packed[:-1], packed + b"\0"):
        with pytest.raises(ValueError, match="expected 2 bytes"):
            kernel.decode_sets(wrong, 3, 2, 8, np.dtype(np.uint8))
    with pytest.raises(ValueError, match="must be zero"):
        kernel.decode_sets(bytes([packed[0], packed[1] | 0x80]), 3, 2, 8, np.dtype(np.uint8))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_give_the_same_bytes(threads: int) -> None:
    for experts, k, count in ((128, 8, 1000), (512, 22, 333), (8, 2, 65)):
        ids = random_sets(count, experts, k)
        packed = kernel.encode_sets(ids, experts)
        assert bytes(kernel.encode_sets(ids, experts, threads)) == bytes(packed)
        unpacked = kernel.decode_sets(packed, count, k, experts, ids.dtype, threads)
        np.testing.assert_array_equal(unpacked, np.sort(ids, axis=1))


def test_threads_name_the_first_bad_set() -> None:
    ids = random_sets(640, 128, 8)
    ids[600, 3] = ids[600, 4]
    ids[333, 0] = 128
    with pytest.raises(ValueError, match="set 333"):
        kernel.encode_sets(ids, 128, threads=4)


@pytest.mark.parametrize("experts", [100, 256, 300, 65536])
@pytest.mark.parametrize("k", [1, 2, 3, 6, 8, 10, 16, 22, 32, 33, 64])
def test_first_bad_set_finds_every_place(experts: int, k: int) -> None:
    """One bad id at a time, at every slot, in the first, a middle and the last set."""
    ids = random_sets(1100, experts, k)
    assert kernel.first_bad_set(ids, experts) == -1
    for number in (0, 63, 700, 1099):
        for slot in range(k):
            for other in {(slot + 1) % k, (slot + k // 2) % k} - {slot}:
                spoiled = ids.copy()
                spoiled[number, slot] = spoiled[number, other]
                assert kernel.first_bad_set(spoiled, experts) == number
            if experts not in (256, 65536):
                spoiled = ids.copy()
                spoiled[number, slot] = experts
                assert kernel.first_bad_set(spoiled, experts) == number


@given(st.integers(1, 40), st.integers(0, 300), st.sampled_from([np.uint8, np.uint16]), st.integers(0, 2**32))
def test_first_bad_set_is_the_plain_definition(k: int, count: int, dtype: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(k, 257))
    ids = rng.integers(0, max(experts, 250), (count, k)).astype(dtype)
    good = rng.random(count) < 0.99
    ids[good] = np.argsort(rng.random((int(good.sum()), experts)), axis=1)[:, :k]
    plain = (n for n, row in enumerate(ids.tolist()) if len(set(row)) < k or max(row) >= experts)
    assert kernel.first_bad_set(ids, experts) == next(plain, -1)


@pytest.mark.parametrize(("experts", "k"), [(100, 8), (300, 8), (300, 22), (100, 6), (300, 40), (300, 10), (2, 1)])
def test_hash_and_check(experts: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any length and any place: the hash is the xxhash package's, and the bad set is the first."""
    monkeypatch.setattr(kernel.in_numpy, "CACHED_BYTES", 5000)
    rng = np.random.default_rng(0)
    for count in (0, 1, 9, 64, 200, 1300, 5000):
        for offset in (0, 80, 272, 1040):
            ids = np.tile(random_sets(100, experts, k), (count // 100 + 1, 1))[:count]
            for bad in {-1, 0, count // 2, count - 1} if count else {-1}:
                spoiled = ids.copy()
                if bad >= 0:
                    spoiled[[bad, count - 1], rng.integers(k)] = experts
                data = memoryview(rng.bytes(offset) + spoiled.tobytes())
                found = kernel.hash_and_check(data, offset, k, experts, ids.dtype)
                assert found == (xxhash.xxh3_64_intdigest(data), bad)


def test_sort_sets() -> None:
    for k in (1, 2, 3, 8, 13, 22, 100):
        for dtype in (np.uint8, np.uint16, np.int64):
            ids = np.random.default_rng(k).integers(0, 250, (5, 30, k)).astype(dtype)
            before = ids.copy()
            np.testing.assert_array_equal(kernel.sort_sets(ids), np.sort(ids, axis=-1))
            np.testing.assert_array_equal(ids, before)
            np.testing.assert_array_equal(kernel.sort_sets(ids[:, ::2]), np.sort(ids[:, ::2], axis=-1))


def test_views_and_other_dtypes() -> None:
    ids = random_sets(100, 128, 8)
    expected = bytes(kernel.encode_sets(ids, 128))
    wide = np.zeros((100, 16), np.uint8)
    wide[:, ::2] = ids
    assert bytes(kernel.encode_sets(wide[:, ::2], 128)) == expected
    assert bytes(kernel.encode_sets(ids.astype(np.int64), 128)) == expected
    assert bytes(kernel.encode_sets(ids.astype(">u2"), 128)) == expected
    assert kernel.first_bad_set(ids.astype(np.int64), 128) == -1


def test_environment_asks_for_numpy() -> None:
    code = "from router_replay import kernel; print(kernel.COMPILED)"
    environment = {**os.environ, "ROUTER_REPLAY_NO_KERNEL": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
