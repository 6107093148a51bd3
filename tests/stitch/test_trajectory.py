"""Trajectory: rules 1-3, the traps of resumed, doubled, overwritten and boundary rows, each by name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_replay import RouterSpec, Routes, Trajectory
from router_replay.errors import StitchError
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(1, 2))


class Engine:
    """Routes as a function of position, token and weights, so that a misplaced row is seen."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def rows(self, tokens: list[int], start: int) -> Routes:
        first = [(7 * position + 3 * token + 5 * self.version) % 16 for position, token in enumerate(tokens[:-1])]
        ids = [[[e, (e + 1 + layer) % 16] for layer in range(2)] for e in first]
        return Routes(np.array(ids, np.int64).reshape(-1, 2, 2), SPEC)[start:]

    def respond(self, prompt: list[int], completion: list[int], start: int = 0) -> tuple:
        logprobs = [-0.01 * token - self.version for token in completion]
        return prompt, completion, logprobs, self.rows(prompt + completion, start), start, self.version


def test_first_turn() -> None:
    trajectory = Trajectory(SPEC)
    assert trajectory.append(*Engine().respond([5, 6, 7], [8, 9])) is trajectory
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True]
    assert np.allclose(trajectory.logprobs, [0, 0, 0, -0.08, -0.09])
    assert trajectory.routes.captured.tolist() == [True] * 4 + [False]
    assert trajectory.next_start == 4


def test_every_sampled_token_keeps_its_version_over_turns_branches_and_cuts() -> None:
    trajectory = Trajectory(SPEC)
    prompt, completion, logprobs, rows, start, _ = Engine().respond([5, 6], [8, 9, 1])
    trajectory.append(prompt, completion, logprobs, rows, start, versions=[3, 4, 4])
    trajectory.append(*Engine(6).respond([5, 6, 8, 9, 1, 7], [2], start=trajectory.next_start))  # one for all
    assert trajectory.versions.tolist() == [0, 0, 3, 4, 4, 0, 6]
    branch = trajectory.append(*Engine(7).respond([5, 6, 8, 3], [2]), branch=True)
    assert branch.versions.tolist() == [0, 0, 0, 0, 7]  # the common prefix is trained where it was sampled
    trajectory.truncate(4)
    assert trajectory.versions.tolist() == [0, 0, 3, 4]
    with pytest.raises(StitchError, match=r"versions must be 1 integers, one per completion token, got \[2\]"):
        trajectory.append([5, 6, 8, 9], [1], [-1.0], None, versions=[1, 2], allow_gap=True)


def test_the_boundary_row_comes_from_the_next_response() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9]))
    trajectory.append(*engine.respond([5, 6, 7, 8, 9, 1], [2, 3], start=trajectory.next_start))
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True, True, False, True, True]
    assert trajectory.logprobs[5] == 0
    assert trajectory.routes[:7].same_sets(engine.rows([5, 6, 7, 8, 9, 1, 2, 3], 0))
    assert trajectory.next_start == 7


def test_a_response_that_covers_everything_is_not_doubled() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9]))
    trajectory.append(*engine.respond([5, 6, 7, 8, 9], [2, 3]))  # a resume that returned all rows
    assert len(trajectory.routes) == len(trajectory.token_ids) == 7
    assert trajectory.routes[:6].same_sets(engine.rows([5, 6, 7, 8, 9, 2, 3], 0))


def test_first_capture_wins_and_versions_stay_with_their_rows() -> None:
    trajectory, old, new = Trajectory(SPEC), Engine(version=3), Engine(version=4)
    trajectory.append(*old.respond([5, 6, 7], [8, 9]))
    trajectory.append(*new.respond([5, 6, 7, 8, 9], [2, 3]))  # new weights route the old prefix anew
    whole = [5, 6, 7, 8, 9, 2, 3]
    assert trajectory.routes[:4].same_sets(old.rows(whole, 0)[:4])
    assert trajectory.routes[4:6].same_sets(new.rows(whole, 4))
    assert trajectory.routes.versions[:6].tolist() == [3, 3, 3, 3, 4, 4]


def test_rows_that_carry_their_own_versions_keep_them() -> None:
    trajectory = Trajectory(SPEC)
    rows = Engine().rows([5, 6, 7, 8], 0).with_versions([1, 1, 2])
    trajectory.append([5, 6], [7, 8], [-1.0, -1.0], rows, version=9)
    assert trajectory.routes.versions[:3].tolist() == [1, 1, 2]


def test_abort_without_output_then_resume() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append([5, 6, 7], [], [], None)
    assert trajectory.next_start == 0
    assert not trajectory.routes.captured.any()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9], start=trajectory.next_start))
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert trajectory.routes[:4].same_sets(engine.rows([5, 6, 7, 8, 9], 0))


def test_a_gap_raises_or_stays_uncaptured_and_is_filled_by_a_later_response() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8]))
    late = engine.respond([5, 6, 7, 8, 1, 2], [3], start=5)
    with pytest.raises(StitchError, match=r"rows \[3, 5\) are missing.*next_start=3"):
        trajectory.append(*late)
    assert len(trajectory) == 4  # nothing of a refused response is kept
    trajectory.append(*late, allow_gap=True)
    assert trajectory.routes.captured.tolist() == [True] * 3 + [False] * 2 + [True, False]
    assert trajectory.next_start == 3
    trajectory.append(*engine.respond([5, 6, 7, 8, 1, 2, 3], [4], start=3))
    assert trajectory.routes[:7].same_sets(engine.rows([5, 6, 7, 8, 1, 2, 3, 4], 0))


@pytest.mark.parametrize(("rows", "hint"), [(6, "number of all rows"), (3, "do not belong to the tokens")])
def test_the_number_of_rows_must_fit_the_tokens(rows: int, hint: str) -> None:
    trajectory = Trajectory(SPEC)
    trajectory.append(*Engine().respond([5, 6, 7], [8, 9]))
    with pytest.raises(
        StitchError, match=rf"expected 2 rows \(prompt 5 \+ completion 2 - 1 - start 4\), got {rows}: .*{hint}"
    ):
        trajectory.append([5, 6, 7, 8, 9], [2, 3], [-1, -1], random_routes(rows, SPEC), start=4)


def test_retokenised_history_is_found_with_its_position() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9]))
    with pytest.raises(StitchError, match="at position 3 of 5 expected token 8, got 12"):
        trajectory.append(*engine.respond([5, 6, 7, 12, 9, 1], [2]))
    with pytest.raises(StitchError, match="the prompt ends at position 4"):
        trajectory.append(*engine.respond([5, 6, 7, 8], [2]))
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 9]


def test_a_branch_shares_the_common_prefix_without_copying() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9]))
    before = trajectory.routes
    other = trajectory.append(*engine.respond([5, 6, 7, 8, 1], [2], start=4), branch=True)
    assert other is not trajectory
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert other.token_ids.tolist() == [5, 6, 7, 8, 1, 2]
    # token 8 was sampled, and is trained, on the first branch
    assert other.loss_mask.tolist() == [False] * 5 + [True]
    assert any(np.shares_memory(piece.ids, before.ids) for piece in other._rows._pieces() if len(piece))
    assert other.routes[:5].same_sets(engine.rows([5, 6, 7, 8, 1, 2], 0))
    trajectory.append(*engine.respond([5, 6, 7, 8, 9, 3], [4], start=4))
    assert other.routes[:5].same_sets(engine.rows([5, 6, 7, 8, 1, 2], 0))
    assert trajectory.routes[:6].same_sets(engine.rows([5, 6, 7, 8, 9, 3, 4], 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1], [-1.0], None), "prompt_ids must have at least one token"),
        (([1], [2], [], None), "logprobs must be 1 numbers"),
        (([1], [2], [float("nan")], None), "logprobs of the completion: the value at position 0 is nan"),
        (([1], [2], [-1.0], None), "1 sampled tokens but no routes"),
        (([1], [2], [-1.0], [[1]]), "routes must be a Routes, got list"),
        (([[1]], [2], [-1.0], None), "prompt_ids must be a flat sequence"),
        (([1.5], [2], [-1.0], None), "prompt_ids must be a flat sequence"),
        (([1], [2], [-1.0], random_routes(1, RouterSpec(4, 2, (0,)))), "another model"),
        (([1, 2], [2], [-1.0], random_routes(2, SPEC), -1), "start must be at least 0, got -1"),
        (([1, 2], [2], [-1.0], random_routes(2, SPEC), 3), r"start must be an integer in \[0, 2\]"),
    ],
)
def test_a_response_that_cannot_be_is_refused(arguments: tuple, message: str) -> None:
    trajectory = Trajectory(SPEC)
    with pytest.raises(StitchError, match=message):
        trajectory.append(*arguments)
    assert len(trajectory) == 0


def test_what_was_read_does_not_change_when_the_trajectory_grows() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9]))
    tokens, routes = trajectory.token_ids, trajectory.routes
    ids = routes.ids[:4].copy()
    trajectory.append(*engine.respond([5, 6, 7, 8, 9, 1], [2], start=4))
    assert tokens.tolist() == [5, 6, 7, 8, 9]
    assert np.array_equal(routes.ids[:4], ids)
    assert routes.captured.tolist() == [True] * 4 + [False]


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),  # environment tokens
        st.lists(st.integers(0, 9), max_size=4),  # sampled tokens: none is an abort before the first
        st.sampled_from(["from next_start", "everything", "some overlap"]),
        st.booleans(),  # weights change before the turn
        st.booleans(),  # read the routes after the turn
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200)
@given(turns)
def test_any_sequence_of_turns_gives_the_rows_of_first_capture(turns: list) -> None:
    trajectory, version = Trajectory(SPEC), 0
    tokens, mask, first_seen = [1], [False], {}
    for number, (environment, sampled, cover, swap, read) in enumerate(turns):
        version += swap
        engine = Engine(version)
        prompt = tokens + environment
        start = {"from next_start": trajectory.next_start, "everything": 0, "some overlap": trajectory.next_start // 2}[
            cover
        ]
        prompt_given = prompt
        if not sampled and number % 2:  # an aborted engine may also return no routes at all
            trajectory.append(prompt_given, [], [], None, start, version)
        else:
            trajectory.append(*engine.respond(prompt_given, sampled, start))
            for row, ids in enumerate(engine.rows(prompt + sampled, start).ids, start):
                first_seen.setdefault(row, (ids, version))
        tokens = prompt + sampled
        mask += [False] * len(environment) + [True] * len(sampled)
        if read:
            assert len(trajectory.routes) == len(tokens)
    assert trajectory.token_ids.tolist() == tokens
    assert trajectory.loss_mask.tolist() == mask
    assert trajectory.next_start == next(row for row in range(len(tokens) + 1) if row not in first_seen)
    routes = trajectory.routes
    for row in range(len(tokens)):
        assert routes.captured[row] == (row in first_seen)
        if row in first_seen:
            ids, routed_by = first_seen[row]
            assert np.array_equal(routes.ids[row], ids)
            assert routes.versions[row] == routed_by


def test_start_for_a_prompt_leaves_out_what_is_known_of_it() -> None:
    trajectory = Trajectory(SPEC)
    assert trajectory.start_for([5, 6]) == 0
    trajectory.append(*Engine().respond([5, 6, 7], [8, 9]))
    assert trajectory.start_for([5, 6, 7, 8, 9, 1]) == 4  # extends: all but the boundary row
    assert trajectory.start_for([5, 6, 3, 3, 3, 3]) == 2  # history was rewritten at position 2
    assert trajectory.start_for([5, 6, 7]) == 2  # the last prompt row is always returned


# -- answers that are cut -------------------------------------------------------------------------


def two_turns() -> tuple[Trajectory, Routes]:
    """Eight tokens of two policy versions, and all their rows but the last."""
    trajectory, old, new = Trajectory(SPEC), Engine(version=3), Engine(version=4)
    trajectory.append(*old.respond([5, 6, 7], [8, 9]))
    trajectory.append(*new.respond([5, 6, 7, 8, 9, 1], [2, 3], start=4))
    return trajectory, trajectory.routes[:7]


@pytest.mark.parametrize("length", range(9))
def test_a_cut_keeps_tokens_logprobs_mask_rows_and_versions_up_to_there(length: int) -> None:
    trajectory, rows = two_turns()
    before = [trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), trajectory.loss_mask.tolist()]
    trajectory.truncate(length)
    after = [trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), trajectory.loss_mask.tolist()]
    assert after == [values[:length] for values in before]
    assert len(trajectory) == len(trajectory.routes) == length
    assert trajectory.next_start == min(length, 7)
    assert trajectory.routes[:7] == rows[:length]


def test_a_cut_answer_goes_on_with_another_turn() -> None:
    trajectory, rows = two_turns()
    trajectory.truncate(4)  # in the middle of the first answer, whose row 3 is known
    engine = Engine(version=5)
    trajectory.append(*engine.respond([5, 6, 7, 8, 2], [6], start=trajectory.next_start))
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 2, 6]
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True, False, True]
    assert trajectory.routes.captured.tolist() == [True] * 5 + [False]
    assert trajectory.routes[:4] == rows[:4]
    assert trajectory.routes.versions[4] == 5


def test_a_cut_before_a_hole_leaves_no_hole_and_a_cut_behind_it_keeps_it() -> None:
    for length, next_start in ((3, 3), (5, 3), (6, 3)):
        trajectory, engine = Trajectory(SPEC), Engine()
        trajectory.append(*engine.respond([5, 6, 7], [8]))
        trajectory.append(*engine.respond([5, 6, 7, 8, 1, 2], [3], start=5), allow_gap=True)
        trajectory.truncate(length)
        assert trajectory.next_start == next_start
        assert trajectory.routes.captured.tolist() == ([True] * 3 + [False] * 2 + [True])[:length]


def test_a_cut_leaves_branches_and_what_was_read_alone() -> None:
    trajectory, rows = two_turns()
    branch = trajectory.append(*Engine(version=5).respond([5, 6, 7, 8, 0], [4], start=4), branch=True)
    tokens, routes = trajectory.token_ids, trajectory.routes
    trajectory.truncate(2)
    trajectory.append(*Engine(version=6).respond([5, 6, 0, 0, 0], [1, 1], start=2))
    assert tokens.tolist() == [5, 6, 7, 8, 9, 1, 2, 3]
    assert routes[:7] == rows
    assert branch.token_ids.tolist() == [5, 6, 7, 8, 0, 4]
    assert branch.routes[:4] == rows[:4]


@pytest.mark.parametrize("length", [9, -1, 2.0, True, None, 2**64])
def test_a_cut_to_a_length_that_cannot_be_is_refused_and_changes_nothing(length: object) -> None:
    trajectory, rows = two_turns()
    with pytest.raises(StitchError, match="length must be"):
        trajectory.truncate(length)  # type: ignore[arg-type]
    assert len(trajectory) == 8
    assert trajectory.routes[:7] == rows


# -- what a response may look like at its edges, and what it costs --------------------------------


def test_a_response_may_bring_no_rows_at_all() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8, 9]))
    trajectory.append(*engine.respond([5, 6, 7, 8, 9], [], start=4))  # an abort: all its rows were left out
    assert trajectory.routes.captured.tolist() == [True] * 4 + [False]
    with pytest.raises(StitchError, match=r"start must be an integer in \[0, 4\] for 5 \+ 0 tokens, got 5"):
        trajectory.append([5, 6, 7, 8, 9], [], [], random_routes(0, SPEC), start=5, allow_gap=True)


def test_a_response_that_begins_where_the_rows_end_leaves_no_gap() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    trajectory.append(*engine.respond([5, 6, 7], [8]))
    trajectory.append(*engine.respond([5, 6, 7, 8, 1], [2], start=3))
    assert trajectory.next_start == 5
    with pytest.raises(StitchError, match=r"rows \[5, 6\) are missing"):
        trajectory.append(*engine.respond([5, 6, 7, 8, 1, 2, 3], [4], start=6))


def test_rows_are_copied_once_at_the_end_and_twice_at_most_when_read_after_every_turn() -> None:
    for read in (False, True):
        trajectory, engine, tokens = Trajectory(SPEC), Engine(), [1]
        for turn in range(200):
            trajectory.append(*engine.respond(tokens, [turn % 7], start=trajectory.next_start))
            tokens = [*tokens, turn % 7]
            if read:
                assert len(trajectory.routes) == len(tokens)
        assert len(trajectory.routes) == 201
        assert 200 <= trajectory._rows.rows_copied <= (400 if read else 200)


def test_what_is_kept_of_a_response_does_not_keep_the_whole_of_it() -> None:
    trajectory, engine = Trajectory(SPEC), Engine()
    first, second = engine.respond([5, 6, 7], [8, 9]), engine.respond([5, 6, 7, 8, 9], [2, 3])
    trajectory.append(*first)
    trajectory.append(*second)  # repeats four rows
    whole, part = trajectory._rows._pending
    assert np.shares_memory(whole.ids, first[3].ids)
    assert not np.shares_memory(part.ids, second[3].ids)


def test_a_trajectory_says_what_it_holds() -> None:
    trajectory, _ = two_turns()
    assert repr(trajectory) == "Trajectory(8 tokens, 4 sampled, next_start=7)"


def test_rows_are_of_version_0_unless_said_and_a_missing_row_holds_zeros() -> None:
    trajectory = Trajectory(SPEC)
    trajectory.append([5, 6], [7, 8], [-1.0, -1.0], Engine().rows([5, 6, 7, 8], 0))
    assert trajectory.routes.versions.tolist() == [0, 0, 0, 0]
    later, _ = two_turns()
    assert later.routes.versions.tolist() == [3, 3, 3, 3, 4, 4, 4, 0]
    for read in (trajectory, later):
        assert not read.routes.ids[-1].any()


class Answer(NamedTuple):
    token_ids: np.ndarray
    logprobs: np.ndarray
    routes: Routes
    start: int


class Asked(NamedTuple):
    token_ids: list[int]


def test_add_takes_no_gap_and_no_other_history_unless_asked() -> None:
    prompt, completion, logprobs, rows, _, _ = Engine().respond([5, 6, 7], [8, 9])
    trajectory = Trajectory(SPEC)
    late = Answer(np.array(completion), np.array(logprobs), rows[2:], 2)
    with pytest.raises(StitchError):
        trajectory.add(Asked(prompt), late)
    trajectory.add(Asked(prompt), Answer(np.array(completion), np.array(logprobs), rows, 0))
    with pytest.raises(StitchError):
        trajectory.add(Asked([5, 6, 1, 8, 9, 3]), Answer(np.array([4]), np.array([-1.0]), rows[:0], 6))
