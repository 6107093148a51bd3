"""RouteStore: routes are found by the content of their tokens, and by nothing else."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterSpec, Routes, RouteStore, Trajectory, wire
from router_replay.engines.types import Completion, Request
from router_replay.errors import StoreError, WireError
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(0, 2))
PROMPT, ANSWER = [5, 6, 7], [8, 9]


def rows(count: int, seed: int = 0) -> Routes:
    return random_routes(count, SPEC, seed)


def found(store: RouteStore, tokens: list[int], **options: Any) -> Routes:
    match = store.find(tokens, **options)
    assert match is not None
    return match.routes


# -- filling -----------------------------------------------------------------------------------------


def completion_of(routes: Routes, start: int = 0, tokens: list[int] = ANSWER) -> tuple[Request, Completion]:
    request = Request(PROMPT, start=start)
    length = len(tokens)
    return request, Completion(
        request.id, 0, np.array(tokens), np.zeros(length), routes, start, "stop", np.zeros(length, np.int64)
    )


def test_a_completion_a_trajectory_and_a_blob_of_one_answer_are_stored_alike() -> None:
    tokens, routes = PROMPT + ANSWER, rows(4)
    trajectory = Trajectory(SPEC)
    trajectory.append(PROMPT, ANSWER, [-1.0, -1.0], routes)
    blob = wire.encode(routes, codec="dense", token_ids=tokens)
    mask = [0, 0, 0, 1, 1]
    stores = [RouteStore(SPEC) for _ in range(4)]
    assert stores[0].add(tokens, routes, loss_mask=mask)
    assert stores[1].add_completion(*completion_of(routes))
    assert stores[2].add_trajectory(trajectory)
    assert stores[3].add_blob(blob, tokens, loss_mask=mask)
    for store in stores:
        match = store.find(tokens)
        assert match is not None
        assert np.array_equal(match.routes[:4].ids, routes.ids)
        assert match.routes[:4].all_captured
        assert not match.routes[4:].any_captured  # the trajectory has a row for the last token, which is missing
        assert match.bears_loss is not None
        assert match.bears_loss.tolist() == [False, False, True, True]  # row 2 predicts the first sampled token
        assert (match.tokens, match.ambiguous) == (5, False)


def test_rows_that_begin_later_leave_those_before_missing() -> None:
    store = RouteStore(SPEC)
    store.add_completion(*completion_of(rows(2), start=2))
    assert found(store, PROMPT + ANSWER).captured.tolist() == [False, False, True, True]
    blob = wire.encode(rows(2), token_ids=[1, 2, 3, 4], start=1)
    store.add_blob(blob, [1, 2, 3, 4])
    assert found(store, [1, 2, 3, 4]).captured.tolist() == [False, True, True]


def test_an_answer_without_tokens_adds_nothing() -> None:
    store = RouteStore(SPEC)
    assert not store.add_completion(*completion_of(Routes.missing(0, SPEC), tokens=[]))
    assert len(store) == 0


def test_a_stored_row_cannot_change_and_keeps_no_other_memory_alive() -> None:
    store, whole = RouteStore(SPEC), rows(1000)
    store.add([1, 2, 3], whole[:2])
    ids = found(store, [1, 2, 3]).ids
    assert ids.base is None or ids.base.nbytes == ids.nbytes
    assert not found(store, [1, 2, 3]).ids.flags.writeable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], rows(1)), r"expected 2 rows \(tokens 3 - 1 - start 0\), or one more .*, got 1"),
        (([1, 2, 3], rows(4)), "got 4"),
        (([], rows(0)), "rows and tokens do not fit"),
        (([1.5, 2.0], rows(1)), "token_ids must be a flat sequence of integers"),
        (([1, 2], [[1]]), "routes must be a Routes, got list"),
        (([1, 2], random_routes(1, RouterSpec(8, 2, (0, 1)))), "routes are of another model"),
        (([1, 2, 3], Routes.missing(2, SPEC)), "none of the 2 rows is captured"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_stored(arguments: Any, message: str) -> None:
    store = RouteStore(SPEC)
    with pytest.raises(StoreError, match=message):
        store.add(*arguments)
    assert (len(store), store.nbytes) == (0, 0)


def test_a_loss_mask_must_be_one_of_the_tokens() -> None:
    for mask in ([1, 1], [0, 1, 2], [0.5, 0, 1]):
        with pytest.raises(StoreError, match="loss_mask must have one entry per token, 0 or 1"):
            RouteStore(SPEC).add([1, 2, 3], rows(2), loss_mask=mask)
    with pytest.raises(StoreError, match="start must be at least 0"):
        RouteStore(SPEC).add([1, 2, 3], rows(2), start=-1)
    with pytest.raises(StoreError, match="max_bytes must be at least 1"):
        RouteStore(SPEC, max_bytes=0)


def test_a_trajectory_without_routes_is_refused() -> None:
    class Bare:
        token_ids, loss_mask, routes = np.array([1, 2]), np.array([0, 1]), None

    with pytest.raises(StoreError, match="the trajectory has no routes"):
        RouteStore(SPEC).add_trajectory(Bare())


def test_a_blob_of_other_tokens_or_without_a_digest_is_refused() -> None:
    store = RouteStore(SPEC)
    with pytest.raises(WireError, match="these routes belong to other tokens"):
        store.add_blob(wire.encode(rows(2), token_ids=[1, 2, 3]), [1, 2, 4])
    with pytest.raises(WireError, match="the blob has no token digest"):
        store.add_blob(wire.encode(rows(2)), [1, 2, 3])
    with pytest.raises(WireError, match="of another model"):
        store.add_blob(wire.encode(random_routes(2, RouterSpec(8, 2, (1,))), token_ids=[1, 2, 3]), [1, 2, 3])
    assert len(store) == 0


def test_a_sequence_that_bears_no_loss_may_have_no_rows() -> None:
    store = RouteStore(SPEC)
    assert store.add([1, 2, 3], Routes.missing(2, SPEC), loss_mask=[0, 0, 0])
    assert not found(store, [1, 2, 3]).any_captured


# -- finding -----------------------------------------------------------------------------------------


def test_samples_that_begin_alike_are_told_apart_by_their_whole_sequence() -> None:
    store = RouteStore(SPEC)
    for number, tokens in enumerate(([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3], [1, 2, 3, 4, 6])):
        store.add(tokens, rows(len(tokens) - 1, number))
    for number, tokens in enumerate(([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3], [1, 2, 3, 4, 6])):
        assert found(store, tokens) == rows(len(tokens) - 1, number)
        match = store.find(tokens)
        assert match is not None
        assert not match.ambiguous


def test_the_beginning_of_a_sequence_has_its_rows_and_nothing_else_has() -> None:
    store = RouteStore(SPEC)
    store.add([1, 2, 3, 4, 5], rows(4))
    for end in range(1, 6):
        assert found(store, [1, 2, 3, 4, 5][:end]) == rows(4)
    for other in ([], [2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 6], [1, 3], [1, 2, 3, 4, 5, 5]):
        assert store.find(other) is None


def test_a_beginning_that_fits_several_samples_takes_the_shortest_and_says_so() -> None:
    store = RouteStore(SPEC)
    store.add([1, 2, 3, 9, 9], rows(4, 1))
    store.add([1, 2, 3, 4], rows(3, 2))
    store.add([1, 2, 3, 5], rows(3, 3))
    match = store.find([1, 2, 3])
    assert match is not None
    assert (match.tokens, match.ambiguous) == (4, True)
    assert match.routes == rows(3, 2)
    alike = RouteStore(SPEC)
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 5]):
        alike.add(tokens, rows(3))
    match = alike.find([1, 2, 3])
    assert match is not None
    assert not match.ambiguous


def test_the_longest_beginning_and_the_nearest_are_found() -> None:
    store = RouteStore(SPEC)
    assert store.nearest([1]) is None
    assert store.find_beginning([1]) is None
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4, 7], [1, 2, 5]):
        store.add(tokens, rows(len(tokens) - 1))
    match = store.find_beginning([1, 2, 3, 4, 8])
    assert match is not None
    assert match.tokens == 3
    assert store.find_beginning([1, 3]) is None
    nearest = store.nearest([1, 2, 3, 4, 8])
    assert nearest is not None
    assert (nearest.tokens.tolist(), nearest.shared) == ([1, 2, 3, 4, 7], 4)


@given(
    stored=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=12),
    asked=st.lists(st.integers(0, 2), min_size=1, max_size=7),
)
def test_finding_is_what_a_search_through_all_sequences_finds(stored: list[list[int]], asked: list[int]) -> None:
    store = RouteStore(SPEC)
    for tokens in stored:
        store.add(tokens, rows(len(tokens) - 1))
    match, beginning, nearest = store.find(asked), store.find_beginning(asked), store.nearest(asked)
    fitting = [len(one) for one in stored if one[: len(asked)] == asked]
    assert (None if match is None else match.tokens) == min(fitting, default=None)
    begins = [len(one) for one in stored if asked[: len(one)] == one]
    assert (None if beginning is None else beginning.tokens) == max(begins, default=None)
    shared = max(sum(one[: end + 1] == asked[: end + 1] for end in range(min(len(one), len(asked)))) for one in stored)
    assert nearest is not None
    assert nearest.shared == shared


# -- the same tokens ---------------------------------------------------------------------------------


def test_the_first_capture_of_the_same_tokens_wins_and_every_use_is_ambiguous() -> None:
    store = RouteStore(SPEC)
    assert store.add([1, 2, 3], rows(2, 1))
    assert not store.add([1, 2, 3], rows(2, 1))  # the same rows again
    match = store.find([1, 2, 3])
    assert match is not None
    assert not match.ambiguous
    assert not store.add([1, 2, 3], rows(2, 2))
    match = store.find([1, 2, 3])
    assert match is not None
    assert match.ambiguous
    assert match.routes == rows(2, 1)


def test_another_slot_order_is_the_same_routing_unless_order_has_a_meaning() -> None:
    for spec, ambiguous in ((SPEC, False), (RouterSpec(8, 2, (0, 2), ordered=True), True)):
        store, routes = RouteStore(spec), random_routes(2, spec)
        store.add([1, 2, 3], routes)
        store.add([1, 2, 3], Routes(routes.ids[..., ::-1].copy(), spec))
        match = store.find([1, 2, 3])
        assert match is not None
        assert match.ambiguous == ambiguous


def test_rows_of_a_newer_policy_take_the_place_of_older_ones() -> None:
    store = RouteStore(SPEC)
    store.add([1, 2, 3], rows(2, 1).with_versions(4))
    assert store.add([1, 2, 3], rows(2, 2).with_versions(5))
    assert not store.add([1, 2, 3], rows(2, 3).with_versions(4))
    match = store.find([1, 2, 3])
    assert match is not None
    assert match.ambiguous
    assert np.array_equal(match.routes.ids, rows(2, 2).ids)


def test_a_key_tells_the_same_tokens_apart() -> None:
    store = RouteStore(SPEC)
    for number, key in enumerate(("a", "b")):
        assert store.add([1, 2, 3], rows(2, number), key=key)
        assert store.add([1, 2, 3, 4], rows(3, 10 + number), key=key)
    for number, key in enumerate(("a", "b")):
        match = store.find([1, 2, 3], key=key)
        assert match is not None
        assert not match.ambiguous
        assert match.routes == rows(2, number)
    assert store.find([1, 2, 3], key="c") is None
    assert store.find_beginning([1, 2, 3, 4, 5], key="c") is None
    assert store.keys([1, 2, 3]) == ("a", "b")
    assert store.keys([1, 2]) == ()
    match = store.find([1, 2, 3])
    assert match is not None
    assert match.ambiguous
    assert match.routes == rows(2, 0)
    store.add([1, 2, 3, 4, 5], rows(4, 20), key="c")  # the key of a longer one fits its beginning
    assert found(store, [1, 2, 3], key="c") == rows(4, 20)


def test_missing_rows_are_filled_by_a_later_capture_that_agrees() -> None:
    store, routes = RouteStore(SPEC), rows(3)
    store.add([1, 2, 3, 4], Routes(routes.ids, SPEC, [False, True, True]))
    assert store.add([1, 2, 3, 4], routes)
    assert found(store, [1, 2, 3, 4]).all_captured
    assert np.array_equal(found(store, [1, 2, 3, 4]).ids, routes.ids)


# -- bounds and threads ------------------------------------------------------------------------------


def test_the_least_recently_used_leave_first_and_are_counted() -> None:
    size = 3 * 8 + 2 * SPEC.row_bytes
    store = RouteStore(SPEC, max_bytes=3 * size)
    for first in (1, 2, 3):
        store.add([first, 0, 0], rows(2))
    assert store.nbytes == 3 * size
    store.find([1, 0, 0])
    store.add([4, 0, 0], rows(2))
    assert (len(store), store.evicted, store.nbytes) == (3, 1, 3 * size)
    assert store.find([2, 0, 0]) is None
    assert store.find([1, 0]) is not None
    store.clear()
    assert (len(store), store.evicted, store.nbytes) == (0, 1, 0)
    assert store.find([1, 0, 0]) is None
    with pytest.raises(StoreError, match=r"needs \d+ bytes, max_bytes is \d+: raise"):
        store.add(list(range(100)), rows(99))


def test_many_keys_of_one_sequence_stay_within_the_bound() -> None:
    size = 3 * 8 + 2 * SPEC.row_bytes
    store = RouteStore(SPEC, max_bytes=2 * size)
    for key in range(10):
        store.add([1, 2, 3], rows(2, key), key=key)
        assert store.nbytes <= store.max_bytes
    assert store.evicted > 0
    assert found(store, [1, 2, 3], key=9) == rows(2, 9)


def test_threads_may_fill_and_read_it_together() -> None:
    """Each thread adds sequences of its own and those that all share; sequences leave meanwhile."""
    store = RouteStore(SPEC, max_bytes=40 * (4 * 8 + 3 * SPEC.row_bytes))
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(60):
            for tokens in ([number, turn, 0, 0], [99, turn % 5, 0, 0]):
                store.add(tokens, rows(3, tokens[1]))
                match = store.find(tokens[:3])
                if match is not None and match.routes != rows(3, tokens[1]):
                    wrong.append(tokens)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.nbytes <= store.max_bytes
    assert store.nbytes == len(store) * (4 * 8 + 3 * SPEC.row_bytes)
    assert store.evicted > 0
