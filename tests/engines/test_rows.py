"""The law of rows, which all engines share: how many there are, whose version each has, and what forced ones keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Capabilities, Completion, Engine, Request, Sampling
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.stitch import Trajectory
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1))
PROMPT = (5, 6, 7, 8)


def assembled(request: Request, **changes: Any) -> Completion:
    rows = random_routes(4 + 3 - 1 - request.start, SPEC)
    parts = {"token_ids": (1, 2, 3), "logprobs": (-1.0, -2.0, -3.0), "routes": rows, "versions": 0}
    return Completion.assemble(request, 0, spec=SPEC, **{**parts, "finish_reason": "length", **changes})


@pytest.mark.parametrize("start", [0, 2, 3])
def test_row_p_minus_1_has_the_version_of_token_p(start: int) -> None:
    completion = assembled(Request(PROMPT, start=start), versions=[3, 3, 4])
    assert completion.versions.tolist() == [3, 3, 4]
    # The prompt was computed by the pass that sampled the first token.
    assert completion.routes.versions.tolist() == [3, 3, 3, 3, 3, 4][start:]


def test_versions_of_all_rows_are_taken_as_they_are() -> None:
    completion = assembled(Request(PROMPT), versions=[1, 1, 2, 2, 2, 3])
    assert completion.routes.versions.tolist() == [1, 1, 2, 2, 2, 3]
    assert completion.versions.tolist() == [2, 2, 3]


@pytest.mark.parametrize("versions", [(), [0] * 7])
def test_versions_that_belong_to_no_row_are_refused(versions: list[int]) -> None:
    with pytest.raises(EngineError, match=f"{len(versions)} versions for 6 rows"):
        assembled(Request(PROMPT), versions=versions)


@pytest.mark.parametrize("rows", [0, 5, 7])
def test_any_other_number_of_rows_is_refused(rows: int) -> None:
    with pytest.raises(EngineError, match=f"expected 6 rows .* got {rows}"):
        assembled(Request(PROMPT), routes=random_routes(rows, SPEC))


def test_an_answer_may_start_where_it_says() -> None:
    completion = assembled(Request(PROMPT, start=2), start=0, routes=random_routes(6, SPEC))
    assert (completion.start, len(completion.routes)) == (0, 6)


def test_rows_that_were_not_captured_are_missing_and_no_row_is_made_up() -> None:
    completion = assembled(Request(PROMPT, start=1), routes=None)
    assert len(completion.routes) == 5
    assert not completion.routes.captured.any()


@pytest.mark.parametrize("reason", [None, "", "error", "tool_calls", 3])
def test_an_end_that_no_engine_has_is_refused(reason: Any) -> None:
    with pytest.raises(EngineError, match="finish_reason"):
        assembled(Request(PROMPT), finish_reason=reason)


# -- forced rows --------------------------------------------------------------------------------------


def forced_answer(forced: Routes, start: int = 0, **changes: Any) -> Completion:
    """An engine of version 9 that used what it was told to."""
    ids = random_routes(6, SPEC, seed=5).ids.copy()
    captured = forced.captured
    ids[: len(forced)][captured] = forced.ids[captured][..., ::-1]  # in slots of its own
    request = Request(PROMPT, start=start, forced_routes=forced)
    return assembled(request, **{"routes": Routes(ids[start:], SPEC), "versions": 9, **changes})


@pytest.mark.parametrize("start", [0, 1, 3])
def test_forced_rows_keep_the_version_that_routed_them_first(start: int) -> None:
    forced = random_routes(3, SPEC, seed=1).with_versions([1, 2, 2])
    assert forced_answer(forced, start).routes.versions.tolist() == [1, 2, 2, 9, 9, 9][start:]


def test_forced_rows_that_name_no_version_get_the_engines() -> None:
    assert set(forced_answer(random_routes(3, SPEC, seed=1)).routes.versions) == {9}


def test_rows_that_were_not_forced_have_the_engines_version() -> None:
    forced = random_routes(3, SPEC, seed=1).with_versions(1)
    holes = Routes(forced.ids, SPEC, captured=np.array([True, False, True]), versions=forced.versions)
    assert forced_answer(holes).routes.versions.tolist() == [1, 9, 1, 9, 9, 9]


@pytest.mark.parametrize("start", [0, 1])
def test_forced_rows_that_did_not_come_back_are_an_error(start: int) -> None:
    forced = random_routes(3, SPEC, seed=1)
    ids = np.concatenate([forced.ids[:2], random_routes(4, SPEC, seed=6).ids])
    with pytest.raises(EngineError, match="did not use the forced experts of row 2"):
        forced_answer(forced, start, routes=Routes(ids[start:], SPEC))
    with pytest.raises(EngineError, match=f"did not use the forced experts of row {start}"):
        forced_answer(forced, start, routes=None)  # an engine that captured nothing proves nothing


# -- the request, and what becomes of an answer -------------------------------------------------------


def test_the_old_name_of_start_goes_on_working() -> None:
    with pytest.warns(DeprecationWarning, match="now called start"):
        request = Request(PROMPT, routes_start=2)
    assert request.start == 2
    with pytest.warns(DeprecationWarning, match="now called start"):
        assert request.routes_start == 2
    assert dataclasses.replace(request, start=1).start == 1
    with pytest.warns(DeprecationWarning, match="now called start"):
        assert Capabilities(routes=True, forced_routes=True, start=True, versions=True).prompt_start


def test_every_request_has_an_id_of_its_own() -> None:
    first, second = Request(PROMPT), Request(PROMPT)
    assert first.id != second.id
    assert dataclasses.replace(first, start=1).id == first.id


def test_a_trajectory_takes_a_request_and_its_completion() -> None:
    trajectory, other = Trajectory(SPEC), Trajectory(SPEC)
    request = Request(PROMPT)
    completion = assembled(request, versions=[3, 3, 4])
    assert trajectory.add(request, completion) is trajectory
    other.append(PROMPT, completion.token_ids, completion.logprobs, completion.routes)
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 1, 2, 3]
    assert trajectory.routes == other.routes
    assert trajectory.routes.versions.tolist()[:6] == [3, 3, 3, 3, 3, 4]
    turn = Request((*trajectory.token_ids.tolist(), 9), start=trajectory.next_start)
    assert turn.start == 6
    [aborted] = Completion.nothing(turn, SPEC)
    trajectory.add(turn, aborted)
    assert (len(trajectory), trajectory.next_start) == (8, 6)
    rows = random_routes(8 + 1 - 1 - 6, SPEC)
    trajectory.add(turn, assembled(turn, token_ids=(2,), logprobs=(-1.0,), routes=rows))
    assert trajectory.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False, True]
    assert trajectory.next_start == 8


def test_a_trajectory_branches_where_an_answer_does() -> None:
    trajectory = Trajectory(SPEC)
    trajectory.add(Request(PROMPT), assembled(Request(PROMPT)))
    changed = Request((5, 6, 9, 9))
    branch = trajectory.add(changed, assembled(changed), branch=True)
    assert branch is not trajectory
    assert branch.token_ids.tolist() == [5, 6, 9, 9, 1, 2, 3]


class Parrot(Engine):
    """Gives n samples of every request, and remembers what it was given."""

    spec = SPEC
    capabilities = Capabilities(routes=True, forced_routes=True, start=True, versions=True)
    version = 0

    def __init__(self) -> None:
        self.given: list[str] = []

    async def submit(self, request: Request) -> list[Completion]:
        self.given.append(request.id)
        return [dataclasses.replace(assembled(request), index=index) for index in range(request.sampling.n)]

    def abort(self, request_ids: Any = None) -> list[Completion]:
        return []

    def pause(self, in_flight: Any = "keep") -> None: ...

    def resume(self) -> None: ...

    def update_weights(self, source: Any, version: int, in_flight: Any = "abort") -> None: ...

    def close(self) -> None: ...


def test_generate_is_flat_and_generate_each_has_a_list_for_each_request() -> None:
    engine = Parrot()
    requests = [Request(PROMPT, Sampling(3, n=n), id=str(n)) for n in (1, 3, 2)]
    each = engine.generate_each(requests)
    assert [[one.index for one in samples] for samples in each] == [[0], [0, 1, 2], [0, 1]]
    assert [[one.request_id for one in samples] for samples in each] == [["1"], ["3"] * 3, ["2"] * 2]
    assert [one.request_id for one in engine.generate(requests)] == ["1", "3", "3", "3", "2", "2"]


@pytest.mark.parametrize("bad", [Request(()), Request((5, 6), start=2), Request(PROMPT, id="twin")])
def test_one_bad_request_refuses_the_batch_before_any_is_sent(bad: Request) -> None:
    engine = Parrot()
    with pytest.raises(EngineError):
        engine.generate([Request(PROMPT, Sampling(3), id="twin"), bad])
    assert engine.given == []
