from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router_replay.runs import Runs

arrays = st.lists(st.integers(0, 2), max_size=12).map(lambda values: np.array(values, np.int64))


@given(arrays, st.integers(0, 12), st.integers(0, 12))
def test_runs_expand_and_slice_like_the_array(array: np.ndarray, start: int, stop: int) -> None:
    runs = Runs.of(array)
    assert np.array_equal(runs.expand(), array)
    assert len(runs) == len(array)
    stop = min(stop, len(array))
    assert np.array_equal(runs.slice(start, stop).expand(), array[start:stop])


@given(st.lists(arrays, min_size=1, max_size=4))
def test_concat_is_canonical(parts: list[np.ndarray]) -> None:
    assert Runs.concat([Runs.of(part) for part in parts]) == Runs.of(np.concatenate(parts))


@given(arrays)
def test_spans_are_where_the_value_is(array: np.ndarray) -> None:
    found = np.zeros(len(array), bool)
    for start, end in Runs.of(array).spans(1):
        found[start:end] = True
    assert np.array_equal(found, array == 1)


@given(st.integers(0, 3), st.integers(0, 5))
def test_a_constant_is_the_runs_of_its_array(value: int, length: int) -> None:
    assert Runs.constant(value, length) == Runs.of(np.full(length, value))


def test_runs_are_equal_where_values_and_lengths_are() -> None:
    assert Runs.of(np.array([1, 1, 2])) != Runs.of(np.array([1, 2, 2]))
    assert Runs.of(np.array([1, 1, 2])) != Runs.of(np.array([1, 1, 3]))
    assert Runs.of(np.array([1])) != [1]


def test_an_empty_slice_has_no_run() -> None:
    runs = Runs.of(np.array([1, 1, 1, 2]))
    for start, stop in ((1, 1), (3, 3), (4, 4), (2, 1)):
        assert runs.slice(start, stop) == Runs((), ())
