"""Routes: rule 4 (bad rows raise where they enter), rule 8 (one or two bytes), and the mask as the only 'missing'."""

from __future__ import annotations

import copy
import dataclasses
import mmap
import pickle
import tempfile
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterSpec, Routes
from router_replay.errors import RoutesError
from router_replay.routes import row_count
from tests.makers import random_ids, random_routes

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 3))
WIDE = RouterSpec(num_experts=512, top_k=3, layers=(0, 1))


# -- rule 4: bad rows raise, with the place -------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[[0, 1], [2, 3]], [[4, 5], [6, 6]]], r"row 1, layer 3: experts \[6, 6\] repeat an expert"),
        ([[[0, 8], [2, 3]]], r"row 0, layer 1: experts \[0, 8\] are not all in \[0, 8\)"),
        ([[[0, -1], [2, 3]]], r"row 0, layer 1.*not with a negative id"),
        ([[[0, 0], [0, 0]]], r"row 0, layer 1.*probably not captured"),
        ([[[0, 1, 2], [2, 3, 4]]], r"\[rows, 2 layers, 2 slots\].*got \[1, 2, 3\]"),
        ([[[0, 1]]], r"got \[1, 1, 2\].*from_engine"),
        ([[[0.0, 1.0], [2.0, 3.0]]], "must hold integers, got dtype float64"),
    ],
)
def test_a_bad_row_raises_with_its_place(bad: list, message: str) -> None:
    with pytest.raises(RoutesError, match=message):
        Routes(bad, SPEC)
    with pytest.raises(ValueError, match=message):
        Routes(bad, SPEC)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16, np.uint64])
def test_a_wider_dtype_is_narrowed_and_never_truncated(dtype: type) -> None:
    routes = Routes(random_ids(5, SPEC).astype(dtype), SPEC)
    assert routes.ids.dtype == np.uint8
    with pytest.raises(RoutesError, match="300"):  # 300 % 256 = 44 would be a wrong but plausible id
        Routes(np.array([[[0, 300], [1, 2]]], dtype), RouterSpec(128, 2, (0, 1)))


def test_the_last_set_of_many_is_checked_too() -> None:
    ids = random_ids(1000, WIDE).copy()
    ids[999, 1] = [7, 9, 7]
    with pytest.raises(RoutesError, match="row 999, layer 1"):
        Routes(ids, WIDE)


def test_a_repeated_expert_in_the_only_row_of_the_only_layer_is_refused() -> None:
    with pytest.raises(RoutesError, match=r"row 0, layer 4: experts \[3, 3\] repeat"):
        Routes([[[3, 3]]], RouterSpec(num_experts=8, top_k=2, layers=(4,)))


@pytest.mark.parametrize("bad", range(7))
def test_no_repeated_expert_hides_among_good_sets(bad: int) -> None:
    ids = random_ids(7, RouterSpec(8, 2, (0,)))
    ids[bad] = 5
    with pytest.raises(RoutesError, match=rf"row {bad}, layer 0: experts \[5, 5\] repeat"):
        Routes(ids, RouterSpec(8, 2, (0,)))


# -- captured is the only word for missing --------------------------------------------------------


def test_uncaptured_rows_are_not_checked_and_carry_no_value() -> None:
    ids = np.full((3, 2, 2), -1)
    ids[1] = [[3, 4], [5, 6]]
    routes = Routes(ids, SPEC, captured=np.array([False, True, False]))
    assert routes.captured.tolist() == [False, True, False]
    assert routes.first_missing == 0
    other = Routes(np.stack([ids[1]] * 3), SPEC, captured=np.array([False, True, False]))
    assert routes == other
    assert routes.same_sets(other)


@pytest.mark.parametrize("captured", [[True], [1, 1, 1], np.ones((3, 1), bool)])
def test_a_mask_that_is_not_one_boolean_per_row_is_refused(captured: object) -> None:
    with pytest.raises(RoutesError, match="captured must be 3 booleans"):
        Routes(random_ids(3, SPEC), SPEC, captured=captured)


# -- memory ---------------------------------------------------------------------------------------


def test_no_copy_of_ids_that_nobody_can_write_to_and_no_writing_through() -> None:
    ids = np.frombuffer(random_ids(4, SPEC).tobytes(), np.uint8).reshape(4, 2, 2)
    routes = Routes(ids, SPEC)
    assert np.shares_memory(routes.ids, ids)
    assert np.shares_memory(routes[1:3].ids, ids)
    assert np.shares_memory(Routes(np.frombuffer(memoryview(ids.base)[4:12], np.uint8).reshape(2, 2, 2), SPEC).ids, ids)
    with pytest.raises(ValueError, match="read-only"):
        routes.ids[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        routes.captured[0] = False


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: Routes(ids, SPEC),
        lambda ids: Routes(ids[:], SPEC, versions=3),
        lambda ids: Routes(read_only_view(ids), SPEC),
        lambda ids: Routes(np.frombuffer(memoryview(ids).toreadonly(), np.uint8).reshape(ids.shape), SPEC),
        lambda ids: Routes.from_engine(ids, RouterSpec(8, 2, (0, 1))),
        lambda ids: Routes(ids, SPEC)[1:],
        lambda ids: Routes(ids, SPEC).with_versions(4),
    ],
)
def test_what_was_checked_cannot_be_changed_through_the_callers_array(make: Callable[[np.ndarray], Routes]) -> None:
    ids = random_ids(4, SPEC)
    routes = make(ids)
    before = routes.ids.tolist()
    ids[:] = 255
    assert routes.ids.tolist() == before


def test_an_array_that_was_made_read_only_can_be_made_writable_again() -> None:
    ids = random_ids(4, SPEC)
    ids.flags.writeable = False
    routes = Routes(ids, SPEC)
    ids.flags.writeable = True
    ids[:] = 255
    assert routes.ids.max() < 8


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda routes: pickle.loads(pickle.dumps(routes))])
def test_copies_and_pickles_are_equal_and_read_only(copied: Callable[[Routes], Routes]) -> None:
    routes = Routes(random_ids(4, SPEC), SPEC, captured=[True, True, False, True], versions=[1, 1, 2, 2])[1:]
    again = copied(routes)
    assert again == routes
    assert again.versions.tolist() == [1, 2, 2]
    assert not again.ids.flags.writeable


def read_only_view(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def test_an_id_costs_one_byte_up_to_256_experts_and_two_above() -> None:
    assert random_routes(10, SPEC).nbytes == 10 * 2 * 2
    assert random_routes(10, WIDE).nbytes == 10 * 2 * 3 * 2


# -- cutting and joining --------------------------------------------------------------------------


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_slices_joined_again_are_the_whole(rows: int, a: int, b: int) -> None:
    a, b = sorted((min(a, rows), min(b, rows)))
    captured = np.random.default_rng(rows).random(rows) < 0.7
    whole = Routes(random_ids(rows, SPEC), SPEC, captured=captured, versions=np.arange(rows) // 3)
    assert Routes.concat([whole[:a], whole[a:b], whole[b:]]) == whole
    assert np.array_equal(whole[a:b].versions, np.arange(rows)[a:b] // 3)
    assert np.array_equal(whole[a:b].captured, captured[a:b])


@given(st.lists(st.integers(-1, 9), max_size=20))
def test_take_moves_rows_masks_and_versions_together(index: list[int]) -> None:
    whole = Routes(random_ids(10, SPEC), SPEC, captured=np.arange(10) != 4, versions=np.arange(10))
    taken = whole.take(np.array(index, np.int64))
    for row, source in enumerate(index):
        assert taken.captured[row] == (source not in (-1, 4))
        if taken.captured[row]:
            assert np.array_equal(taken.ids[row], whole.ids[source])
            assert taken.versions[row] == source


def test_select_layers_goes_by_absolute_id() -> None:
    routes = random_routes(5, SPEC)
    assert np.array_equal(routes.select_layers([3]).ids[:, 0], routes.ids[:, 1])
    assert routes.select_layers([3]).spec.layers == (3,)


def test_joining_two_models_is_refused() -> None:
    with pytest.raises(RoutesError, match="another model"):
        Routes.concat([random_routes(1, SPEC), random_routes(1, WIDE)])


def test_a_step_or_a_number_is_refused() -> None:
    for rows in (slice(0, 4, 2), 3):
        with pytest.raises(RoutesError, match="slice of rows"):
            random_routes(5, SPEC)[rows]  # type: ignore[index]


# -- comparing ------------------------------------------------------------------------------------


@given(st.integers(0, 1000))
def test_sets_do_not_care_for_order_but_equality_does(seed: int) -> None:
    routes = random_routes(6, WIDE, seed)
    turned = Routes(routes.ids[..., ::-1], WIDE)
    assert routes.same_sets(turned) is True
    assert routes != turned
    changed = routes.ids.copy()
    changed[3, 1, 2] = next(e for e in range(512) if e not in changed[3, 1])
    assert routes.same_sets(Routes(changed, WIDE)) is False


@given(st.integers(0, 1000))
def test_sorted_makes_equal_sets_equal_and_keeps_the_rest(seed: int) -> None:
    routes = Routes(random_routes(6, WIDE, seed).ids, WIDE, captured=np.arange(6) != 2, versions=[0, 0, 1, 1, 2, 2])
    turned = Routes(routes.ids[..., ::-1], WIDE, routes.captured, routes.versions)
    assert routes.sorted() == turned.sorted()
    assert routes.sorted().same_sets(routes)
    assert np.array_equal(routes.sorted().ids, np.sort(routes.ids, axis=-1))
    ordered = dataclasses.replace(WIDE, ordered=True)
    assert np.array_equal(Routes(routes.ids, ordered, routes.captured).sorted().ids, routes.ids)


# -- from an engine -------------------------------------------------------------------------------


def engine_array(rows: int, layers: int = 4) -> np.ndarray:
    array = np.zeros((rows, layers, 2), np.uint8)  # dense layers are zeros
    array[:, list(SPEC.layers)] = random_ids(rows, SPEC)
    return array


def test_from_engine_picks_the_routed_layers_by_absolute_id() -> None:
    array = engine_array(5)
    assert np.array_equal(Routes.from_engine(array, SPEC).ids, array[:, [1, 3]])


def test_from_engine_refuses_a_layer_whose_hook_never_ran() -> None:
    array = engine_array(5)
    array[:, 3] = 0
    with pytest.raises(RoutesError, match=r"layers \[3\] hold only zeros in all 5 rows"):
        Routes.from_engine(array, SPEC)


def test_with_top_1_a_layer_of_64_zero_rows_needs_the_callers_word() -> None:
    spec = RouterSpec(4, 1, (0, 1))
    array = np.ones((400, 2, 1), np.uint8)
    array[:, 1] = 0
    assert len(Routes.from_engine(array[:63], spec)) == 63
    for rows in (64, 400):
        with pytest.raises(RoutesError, match=rf"layers \[1\] hold only zeros in all {rows} .*allow_zero_layers=True"):
            Routes.from_engine(array[:rows], spec)
        assert len(Routes.from_engine(array[:rows], spec, allow_zero_layers=True)) == rows
    array[200, 1] = 3  # one other choice proves that the layer is recorded
    assert len(Routes.from_engine(array, spec)) == 400
    assert len(Routes.from_engine(np.zeros((64, 1, 1), np.uint8), RouterSpec(1, 1, (0,)))) == 64  # the only choice


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_above_top_1_no_word_makes_a_zero_layer_good(rows: int) -> None:
    array = engine_array(rows)
    array[:, 3] = 0
    with pytest.raises(RoutesError, match=r"layers \[3\] hold only zeros" if rows > 1 else "probably not captured"):
        Routes.from_engine(array, SPEC, allow_zero_layers=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 2, 2), "every decoder layer, dense ones included: expected more than 3"),
        ((5, 4, 3), r"all decoder layers, 2 slots\], got \[5, 4, 3\]"),
        ((5, 4), r"got \[5, 4\]"),
    ],
)
def test_the_layout_is_never_guessed_from_a_shape(shape: tuple, message: str) -> None:
    with pytest.raises(RoutesError, match=message):
        Routes.from_engine(np.ones(shape, np.uint8), SPEC)


def test_two_routers_in_a_layer_do_not_fit_one_column() -> None:
    with pytest.raises(RoutesError, match="two routers"):
        Routes.from_engine(engine_array(5), RouterSpec(8, 2, (1, 1, 3, 3)))


def test_a_known_number_of_layers_is_checked() -> None:
    spec = RouterSpec(8, 2, (1, 3), num_layers=6)
    with pytest.raises(RoutesError, match="expected 6"):
        Routes.from_engine(engine_array(5), spec)
    assert len(Routes.from_engine(engine_array(5, layers=6), spec)) == 5


# -- prefill and decode workers -------------------------------------------------------------------


def test_prefill_and_decode_rows_join() -> None:
    whole = random_routes(10, SPEC)
    assert Routes.join_prefill_decode(whole[:6], whole[6:]) == whole
    stale = Routes(random_ids(10, SPEC, seed=9), SPEC, captured=np.arange(10) >= 6)
    joined = Routes.join_prefill_decode(whole[:6], stale, decode_start=0, prompt_length=6)
    assert joined[:6] == whole[:6]
    assert joined[6:] == stale[6:]


@pytest.mark.parametrize(
    ("prefill", "decode", "arguments", "message"),
    [
        (slice(0, 6), slice(5, 10), {"decode_start": 5}, "overlap: row 5"),
        (slice(0, 6), slice(7, 10), {"decode_start": 7}, "gap: the decode rows must start at 6 or before.*got 7"),
        (slice(0, 5), slice(6, 10), {"prompt_length": 6}, "expected 6, got 5"),
        (slice(0, 6), slice(0, 3), {"decode_start": 0}, "gap: .* got rows up to 3"),
    ],
)
def test_prefill_and_decode_rows_that_do_not_meet(prefill: slice, decode: slice, arguments: dict, message: str) -> None:
    whole = random_routes(10, SPEC)
    with pytest.raises(RoutesError, match=message):
        Routes.join_prefill_decode(whole[prefill], whole[decode], **arguments)


def test_a_prefill_row_that_was_not_captured_is_refused() -> None:
    whole = Routes(random_ids(10, SPEC), SPEC, captured=np.arange(10) != 2)
    with pytest.raises(RoutesError, match="prompt row 2 is not captured"):
        Routes.join_prefill_decode(whole[:6], whole[6:])


# -- the edges of what is taken -------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.int16), (256, np.int64), (65536, np.int64)])
def test_the_id_one_above_the_last_expert_does_not_wrap_around_to_zero(experts: int, dtype: type) -> None:
    spec = RouterSpec(experts, 2, (0,))
    assert Routes(np.array([[[1, experts - 1]]], dtype), spec).ids.tolist() == [[[1, experts - 1]]]
    with pytest.raises(RoutesError, match=rf"row 0, layer 0: experts \[1, {experts}\] are not all in"):
        Routes(np.array([[[1, experts]]], dtype), spec)


def test_only_a_negative_id_is_taken_for_a_missing_row() -> None:
    with pytest.raises(RoutesError) as refused:
        Routes([[[0, 8], [2, 3]]], SPEC)
    assert "not with a negative id" not in str(refused.value)


def test_a_bad_row_behind_a_hole_is_named_by_its_own_number() -> None:
    ids = random_ids(5, SPEC).astype(np.int64)
    for bad in ([6, 6], [6, 9]):
        ids[4, 1] = bad
        with pytest.raises(RoutesError, match="row 4, layer 3"):
            Routes(ids, SPEC, captured=[True, False, False, True, True])


def test_rows_that_are_not_captured_hold_zeros_whatever_was_there() -> None:
    for dtype in (np.uint8, np.int64):
        routes = Routes(random_ids(3, SPEC).astype(dtype) + 0, SPEC, captured=[True, False, True])
        assert not routes.ids[1].any()
        assert routes.ids[0].any()


@pytest.mark.parametrize(
    "versions", [1.0, [1, 2], [[1, 2, 3]], [1.0, 2.0, 3.0], [1, -1, 2], -1, np.uint64(2**63), True]
)
def test_versions_are_one_or_one_per_row_from_0_to_2_to_the_63(versions: object) -> None:
    with pytest.raises(RoutesError, match="version"):
        Routes(random_ids(3, SPEC), SPEC, versions=versions)
    assert random_routes(3, SPEC).with_versions(0).versions.tolist() == [0, 0, 0]
    assert random_routes(3, SPEC).with_versions([0, 2**63 - 1, 5]).versions.tolist() == [0, 2**63 - 1, 5]


@pytest.mark.parametrize(("access", "shared"), [(mmap.ACCESS_READ, True), (mmap.ACCESS_COPY, False)])
def test_a_map_of_a_file_is_copied_only_where_somebody_can_write_to_it(access: int, shared: bool) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(random_ids(4, SPEC).tobytes())
        file.flush()
        view = memoryview(mmap.mmap(file.fileno(), 0, access=access)).toreadonly()
        ids = np.frombuffer(view, np.uint8).reshape(4, 2, 2)
        assert np.shares_memory(Routes(ids, SPEC).ids, ids) == shared


def test_an_error_lists_eight_layers_at_most() -> None:
    for layers, text in ((8, r"\[0, 1, 2, 3, 4, 5, 6, 7\] hold"), (9, r"5, 6, 7, \.\.\. 9 in all\] hold")):
        with pytest.raises(RoutesError, match=text):
            Routes.from_engine(np.zeros((3, layers, 2), np.uint8), RouterSpec(8, 2, tuple(range(layers))))


# -- rows, masks and versions through every operation ---------------------------------------------


def test_the_first_missing_row_is_found_and_a_whole_routes_has_none() -> None:
    routes = Routes(random_ids(6, SPEC), SPEC, captured=[True, True, False, True, False, True])
    assert (routes.first_missing, routes.all_captured) == (2, False)
    assert (routes[3:4].first_missing, routes[3:4].all_captured) == (1, True)


def test_a_slice_cuts_as_a_list_is_cut() -> None:
    routes, numbers = Routes(random_ids(6, SPEC), SPEC, versions=np.arange(6)), list(range(6))
    for rows in (slice(4, 2), slice(2, None, 1), slice(-2, None), slice(2, 99), slice(0, 0), slice(3, 4)):
        assert routes[rows].versions.tolist() == numbers[rows]
        assert len(routes[rows]) == len(numbers[rows])


@pytest.mark.parametrize("index", [[-2], [10], [0, 10], [-2, 3]])
def test_take_refuses_row_numbers_that_are_not_there(index: list[int]) -> None:
    with pytest.raises(RoutesError, match=r"row numbers must lie in \[-1, 10\)"):
        random_routes(10, SPEC).take(index)


def test_take_makes_empty_rows_of_minus_one() -> None:
    whole = Routes(random_ids(3, SPEC), SPEC, versions=[4, 5, 6])
    taken = whole.take([2, -1, 0])
    assert taken.versions.tolist() == [6, 0, 4]
    assert not taken.ids[1].any()
    assert whole.take([]).captured.tolist() == []
    assert random_routes(3, SPEC).take([0]).version_runs is None
    empty = Routes.missing(0, SPEC)
    assert empty.take([-1, -1]).captured.tolist() == [False, False]
    with pytest.raises(RoutesError, match="row numbers must lie"):
        empty.take([0])


def test_joined_rows_have_versions_where_one_of_the_parts_has() -> None:
    plain = random_routes(2, SPEC)
    assert Routes.concat([plain, plain]).version_runs is None
    assert Routes.concat([plain, plain.with_versions(3)]).versions.tolist() == [0, 0, 3, 3]
    with pytest.raises(RoutesError, match="at least one part"):
        Routes.concat([])


def test_one_part_is_returned_as_it_is() -> None:
    part = random_routes(2, SPEC)
    assert Routes.concat([part]) is part


def test_a_copy_has_memory_of_its_own() -> None:
    whole = Routes(random_ids(6, SPEC), SPEC, versions=np.arange(6))
    part = whole[2:4].copy()
    assert part == whole[2:4]
    assert not np.shares_memory(part.ids, whole.ids)


def test_same_sets_are_of_one_model_one_length_and_the_same_captured_rows() -> None:
    ids = random_ids(4, SPEC)
    routes = Routes(ids, SPEC)
    others = [Routes(ids, RouterSpec(9, 2, (1, 3))), routes[:3], Routes(ids, SPEC, captured=[True, True, True, False])]
    for other in others:
        assert not routes.same_sets(other)
        assert routes != other
    assert routes != routes.with_versions(1)
    assert routes == routes.with_versions(0)
    assert routes != "rows"


def test_a_routes_says_what_it_holds() -> None:
    routes = Routes(random_ids(5, SPEC), SPEC, captured=[True, False, True, True, False])
    assert repr(routes) == "Routes(5 rows, 3 captured, 2 layers, 2 of 8 experts)"


# -- more of an engine's array and of two workers -------------------------------------------------


def test_an_array_that_ends_with_the_layer_before_the_last_routed_one_is_too_narrow() -> None:
    with pytest.raises(RoutesError, match="expected more than 3"):
        Routes.from_engine(np.ones((5, 3, 2), np.uint8), SPEC)


def test_decode_rows_may_end_with_the_prompt_and_an_overlap_is_named_by_its_row() -> None:
    whole = random_routes(6, SPEC)
    assert Routes.join_prefill_decode(whole, Routes.missing(6, SPEC), decode_start=0) == whole
    assert Routes.join_prefill_decode(whole, Routes.missing(2, SPEC), decode_start=4) == whole
    repeated = Routes(random_ids(4, SPEC), SPEC, captured=[False, True, False, True])
    with pytest.raises(RoutesError, match="overlap: row 4 of the prompt"):
        Routes.join_prefill_decode(whole, repeated, decode_start=3)
    with pytest.raises(RoutesError, match="of the same model"):
        Routes.join_prefill_decode(whole, random_routes(2, WIDE))


def test_dense_layers_behind_the_routed_ones_are_left_out() -> None:
    spec = RouterSpec(8, 2, (0, 1))
    ids = random_ids(5, spec)
    dense = np.zeros((5, 1, 2), np.uint8)
    assert np.array_equal(Routes.from_engine(np.concatenate([ids, dense], axis=1), spec).ids, ids)


def test_the_last_sampled_token_has_no_row_and_left_out_rows_do_not_count() -> None:
    assert row_count(5, 3, 0) == 7
    assert row_count(5, 3, 4) == 3
