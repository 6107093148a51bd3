"""Trajectory against the plainest model of it: a list of tokens, and beside it a list of rows.

Hypothesis plays engine responses at random: turns, resumed answers that repeat rows, boundary rows, holes, gaps,
branches, answers that are cut, and responses that must be refused. After every step each trajectory must be what its
lists say, and whatever was handed over is scribbled on, so that nothing of the caller's is kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router_replay import RouterSpec, Routes, Trajectory
from router_replay.errors import StitchError

SPEC = RouterSpec(num_experts=64, top_k=2, layers=(1, 2))
OTHER = RouterSpec(num_experts=64, top_k=2, layers=(1, 3))
MOST_TRAJECTORIES = 4
MOST_TOKENS = 60
INTEGERS = st.sampled_from([int, np.int64, np.int8, np.uint8, np.uint16, np.uint64])
TOKENS = st.lists(st.integers(0, 5), max_size=4)
TOKEN_TYPES = st.sampled_from([list, np.int64, np.int32, np.uint8, np.uint64])
NO_STARTS = st.sampled_from([-1, np.int8(-1), 1.0, np.float64(2), True, "0", None, 2**64, 10**6, np.uint64(2**64 - 1)])


@dataclasses.dataclass
class Row:
    ids: list[list[int]]
    version: int


@dataclasses.dataclass
class Model:
    """What a trajectory should hold. `rows` ends with the last that a response brought; None is a hole."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    rows: list[Row | None] = dataclasses.field(default_factory=list)

    @property
    def next_start(self) -> int:
        return self.rows.index(None) if None in self.rows else len(self.rows)

    def branch(self, stop: int) -> Model:
        return Model(self.tokens[:stop], [0.0] * stop, [False] * stop, self.rows[:stop])

    def take(self, environment: list[int], sampled: list[int], logprobs: list[float]) -> None:
        self.tokens += environment + sampled
        self.logprobs += [0.0] * len(environment) + logprobs
        self.mask += [False] * len(environment) + [True] * len(sampled)

    def take_rows(self, rows: list[Row | None], start: int) -> None:
        self.rows += [None] * (start - len(self.rows))
        for position, row in enumerate(rows, start):
            if position == len(self.rows):
                self.rows.append(row)
            elif self.rows[position] is None:  # first capture wins
                self.rows[position] = row


@dataclasses.dataclass
class Response:
    """The arguments of one append, in arrays that belong to the caller, and what they mean."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    start: int
    rows: list[Row | None]
    version: int
    arguments: dict[str, Any]
    arrays: list[np.ndarray]

    def scribble(self) -> None:
        for array in self.arrays:
            array[:] = 1


class TrajectoryMachine(RuleBasedStateMachine):
    """`self.pairs` are the trajectories that were begun, each with its model."""

    @initialize()
    def begin(self) -> None:
        self.pairs = [(Trajectory(SPEC), Model())]
        self.snapshots: list[tuple[Routes, np.ndarray]] = []
        self.responses = 0

    # -- what engines do ------------------------------------------------------------------------

    @rule(data=st.data())
    def a_turn(self, data: st.DataObject) -> None:
        """A response that extends the tokens, from some row on that leaves no gap; often next_start."""
        trajectory, model = self.draw_pair(data)
        prompt = model.tokens + data.draw(TOKENS, "environment")
        if not prompt or len(prompt) > MOST_TOKENS:
            return
        sampled = data.draw(TOKENS, "sampled")
        highest = min(len(model.rows), len(prompt) + len(sampled) - 1)
        start = data.draw(st.just(min(model.next_start, highest)) | st.integers(0, highest), "start")
        self.append(trajectory, model, self.response(data, prompt, sampled, start))

    @rule(data=st.data())
    def a_turn_behind_a_gap(self, data: st.DataObject) -> None:
        trajectory, model = self.draw_pair(data)
        prompt = model.tokens + data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6), "environment")
        sampled = data.draw(TOKENS, "sampled")
        end = len(prompt) + len(sampled) - 1
        if len(prompt) > MOST_TOKENS or len(model.rows) + 1 > end:
            return
        start = data.draw(st.integers(len(model.rows) + 1, end), "start")
        response = self.response(data, prompt, sampled, start)
        self.refused(trajectory, response, "are missing")
        response.arguments["allow_gap"] = True
        self.append(trajectory, model, response)

    @rule(data=st.data())
    def a_response_without_rows(self, data: st.DataObject) -> None:
        """An abort before the first token, or tokens whose rows nobody recorded."""
        trajectory, model = self.draw_pair(data)
        prompt = model.tokens + data.draw(TOKENS, "environment")
        if not prompt or len(prompt) > MOST_TOKENS:
            return
        sampled = data.draw(TOKENS, "sampled")
        response = self.response(data, prompt, sampled, 0)
        response.arguments["routes"] = None
        if sampled:
            self.refused(trajectory, response, "sampled tokens but no routes")
            response.arguments["allow_gap"] = True
        self.append(trajectory, model, response, with_rows=False)

    @precondition(lambda self: any(model.tokens for _, model in self.pairs))
    @rule(data=st.data())
    def a_branch(self, data: st.DataObject) -> None:
        """The prompt changes or ends early: refused, or a new trajectory with the rows of the common prefix."""
        trajectory, model = self.draw_pair(data, begun=True)
        same = data.draw(st.integers(0, len(model.tokens) - 1), "common prefix")
        rest = data.draw(TOKENS, "environment")
        if rest[:1] == model.tokens[same : same + 1]:
            rest = [model.tokens[same] + 1, *rest[1:]]
        prompt = model.tokens[:same] + rest
        sampled = data.draw(TOKENS, "sampled")
        if not prompt:
            return
        branch = model.branch(same)
        highest = min(len(branch.rows), len(prompt) + len(sampled) - 1)
        response = self.response(data, prompt, sampled, data.draw(st.integers(0, highest), "start"))
        self.refused(trajectory, response, "pass branch=True")
        if len(self.pairs) < MOST_TRAJECTORIES:
            response.arguments["branch"] = True
            self.append(trajectory, branch, response)

    @rule(data=st.data())
    def a_cut(self, data: st.DataObject) -> None:
        """An answer is cut: everything up to there stays, in this trajectory alone."""
        trajectory, model = self.draw_pair(data)
        length = data.draw(st.integers(0, len(model.tokens)), "length")
        trajectory.truncate(data.draw(INTEGERS, "type of length")(length))
        for values in (model.tokens, model.logprobs, model.mask, model.rows):
            del values[length:]

    @rule()
    def read(self) -> None:
        """Reading moves rows inside a trajectory, and must change nothing. What was read must stay as it was."""
        for trajectory, model in self.pairs:
            routes = trajectory.routes
            check_rows(routes, model)
            self.snapshots.append((routes, routes.ids[routes.captured].copy()))

    # -- what must be refused -------------------------------------------------------------------

    @rule(data=st.data())
    def a_wrong_response(self, data: st.DataObject) -> None:
        trajectory, model = self.draw_pair(data)
        prompt = [*model.tokens, 3]
        if len(prompt) > MOST_TOKENS:
            return
        start = min(len(model.rows), len(prompt))
        response = self.response(data, prompt, [1, 2], start)
        count = len(prompt) + 1 - start
        wrong: dict[str, Any] = {
            "start": data.draw(NO_STARTS, "wrong start"),
            "version": data.draw(st.sampled_from([-1, 1.5, True, 2**63, np.uint64(2**63)]), "wrong version"),
            "routes": data.draw(
                st.sampled_from([random_rows(count + 1), random_rows(count - 1), random_rows(count, OTHER), "rows"])
            ),
            "logprobs": data.draw(st.sampled_from([[-1.0], [-1.0, np.nan], [-np.inf, -1.0], ["a", "b"], [[1.0], 2]])),
            "completion_ids": data.draw(
                st.sampled_from([[1.0, 2.0], [[1, 2]], np.array([1, 2**64 - 1], np.uint64), [True, False], ["1", "2"]])
            ),
            "prompt_ids": data.draw(st.sampled_from([[], np.array([2**64 - 1], np.uint64), [0.5], 7])),
        }
        name = data.draw(st.sampled_from(sorted(wrong)), "what is wrong")
        response.arguments |= {name: wrong[name], "allow_gap": name != "routes"}
        self.refused(trajectory, response)

    # -- the work -------------------------------------------------------------------------------

    def draw_pair(self, data: st.DataObject, begun: bool = False) -> tuple[Trajectory, Model]:
        return data.draw(st.sampled_from([pair for pair in self.pairs if pair[1].tokens or not begun]), "trajectory")

    def response(self, data: st.DataObject, prompt: list[int], sampled: list[int], start: int) -> Response:
        self.responses += 1
        count = len(prompt) + len(sampled) - 1 - start
        ids = random_ids(count, seed=self.responses)
        captured = np.ones(count, bool)
        holes = data.draw(st.just([]) | st.lists(st.integers(0, max(count - 1, 0)), max_size=3), "holes")
        captured[[hole for hole in holes if hole < count]] = False
        version = data.draw(st.integers(0, 100), "version")
        versions = np.full(count, version)
        if data.draw(st.booleans(), "rows have their own versions"):
            versions = np.arange(count) // 3 + 200
        routes = Routes(ids, SPEC, captured, versions if count and versions[0] >= 200 else None)
        logprobs = np.float32(-0.25) * np.arange(1, len(sampled) + 1, dtype=np.float32)
        as_type = data.draw(TOKEN_TYPES, "type of the tokens")
        prompt_ids, completion_ids = (
            list(tokens) if as_type is list else np.array(tokens, as_type) for tokens in (prompt, sampled)
        )
        arguments = {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "routes": routes,
            "start": data.draw(INTEGERS, "type of start")(start),
            "version": data.draw(INTEGERS, "type of version")(version),
        }
        rows = [
            Row(row, number) if known else None
            for row, known, number in zip(ids.tolist(), captured.tolist(), versions.tolist(), strict=True)
        ]
        arrays = [ids, captured, versions, logprobs]
        arrays += [array for array in (prompt_ids, completion_ids) if isinstance(array, np.ndarray)]
        return Response(list(prompt), list(sampled), logprobs.tolist(), start, rows, version, arguments, arrays)

    def append(self, trajectory: Trajectory, model: Model, response: Response, with_rows: bool = True) -> None:
        target = trajectory.append(**response.arguments)
        model.take(response.prompt[len(model.tokens) :], response.sampled, response.logprobs)
        if with_rows:
            model.take_rows(response.rows, response.start)
        if all(target is not known for known, _ in self.pairs):
            self.pairs.append((target, model))
        response.scribble()

    def refused(self, trajectory: Trajectory, response: Response, message: str = "") -> None:
        try:
            trajectory.append(**response.arguments)
        except StitchError as error:
            assert message in str(error), error  # noqa: PT017  a message is looked for, not an error
        else:
            raise AssertionError(f"taken: {response.arguments}")

    # -- after every step -----------------------------------------------------------------------

    @invariant()
    def every_trajectory_is_what_its_lists_say(self) -> None:
        for trajectory, model in getattr(self, "pairs", []):
            assert len(trajectory) == len(model.tokens)
            assert trajectory.token_ids.tolist() == model.tokens
            assert trajectory.logprobs.tolist() == model.logprobs
            assert trajectory.loss_mask.tolist() == model.mask
            assert trajectory.next_start == model.next_start
            longer = [*model.tokens, 3]
            assert trajectory.start_for(longer) == min(model.next_start, len(model.tokens))
            # Read from a store of its own, so that looking does not move the trajectory's rows.
            check_rows(trajectory._rows.share(len(model.tokens)).view(len(model.tokens)), model)

    @invariant()
    def what_was_read_stays_as_it_was(self) -> None:
        for routes, ids in getattr(self, "snapshots", []):
            assert np.array_equal(routes.ids[routes.captured], ids)


def check_rows(routes: Routes, model: Model) -> None:
    rows = model.rows + [None] * (len(model.tokens) - len(model.rows))
    assert len(routes) == len(rows)
    assert routes.captured.tolist() == [row is not None for row in rows]
    ids, versions = routes.ids.tolist(), routes.versions.tolist()
    for position, row in enumerate(rows):
        if row is not None:
            assert (ids[position], versions[position]) == (row.ids, row.version), position


def random_ids(rows: int, seed: int, spec: RouterSpec = SPEC) -> np.ndarray:
    """Distinct experts, another row for every seed and position."""
    first = np.random.default_rng(seed).integers(0, spec.num_experts, (rows, len(spec.layers), 1))
    return np.concatenate([first, (first + 1) % spec.num_experts], axis=-1).astype(spec.dtype)


def random_rows(rows: int, spec: RouterSpec = SPEC) -> Routes:
    return Routes(random_ids(rows, 0, spec), spec)
