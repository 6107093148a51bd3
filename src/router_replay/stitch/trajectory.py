"""Trajectory: joins successive engine responses into one sequence of tokens, log-probs and rows.

A prompt of three tokens with two sampled, then a tool's answer of one token with one more sampled:

    trajectory = Trajectory(spec)
    trajectory.append([5, 6, 7], [8, 9], [-0.1, -0.2], rows_0_to_3)          # 3 + 2 - 1 = 4 rows
    trajectory.next_start                                                    # 4: leave rows 0..3 out
    trajectory.append([5, 6, 7, 8, 9, 1], [2], [-0.3], rows_4_to_5, start=4) # row 4 is the boundary row
    trajectory.loss_mask                                                     # 0 0 0 1 1 0 1

Row i belongs to the token at position i as an input. The last sampled token was never forwarded: its
row is the boundary row, which is missing until the next response supplies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from router_replay.arguments import exact_int, float32_array, int64_array, refuse_not_finite
from router_replay.errors import StitchError
from router_replay.routes import Routes, row_count
from router_replay.spec import RouterSpec
from router_replay.stitch.growing import GrowingArray
from router_replay.stitch.rows import RowStore


class RequestLike(Protocol):
    """The attributes of a request that `add` uses; `engines.Request` has them."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt."""


class CompletionLike(Protocol):
    """The attributes of an answer that `add` uses; `engines.Completion` has them.

    It may have `versions` too, the policy version that sampled each token.
    """

    @property
    def token_ids(self) -> np.ndarray:
        """The sampled tokens."""

    @property
    def logprobs(self) -> np.ndarray:
        """The log-prob of each sampled token."""

    @property
    def routes(self) -> Routes:
        """The rows from `start` on."""

    @property
    def start(self) -> int:
        """The position of the first row."""


class Trajectory:
    """Holds the tokens of one rollout with their log-probs, loss mask, versions and rows.

    `spec` is the RouterSpec of the model. `add` and `append` add an engine response; `truncate` removes tokens.
    """

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self._tokens = GrowingArray(np.int64)
        self._logprobs = GrowingArray(np.float32)
        self._loss_mask = GrowingArray(np.bool_)
        self._versions = GrowingArray(np.int64)
        self._rows = RowStore(spec)

    def add(
        self, request: RequestLike, completion: CompletionLike, *, allow_gap: bool = False, branch: bool = False
    ) -> Trajectory:
        """Add an engine's answer, `completion`, to a `request`; return the trajectory that took it, as `append` does.

        `allow_gap` and `branch` are as in `append`. An answer without tokens (aborted before the first one) adds the
        prompt only.
        """
        routes = completion.routes if len(completion.token_ids) else None
        return self.append(
            request.token_ids,
            completion.token_ids,
            completion.logprobs,
            routes,
            completion.start,
            versions=getattr(completion, "versions", None),
            allow_gap=allow_gap,
            branch=branch,
        )

    def append(
        self,
        prompt_ids: ArrayLike,
        completion_ids: ArrayLike,
        logprobs: ArrayLike,
        routes: Routes | None,
        start: int = 0,
        version: int = 0,
        *,
        versions: ArrayLike | None = None,
        allow_gap: bool = False,
        branch: bool = False,
    ) -> Trajectory:
        """Add one engine response; return the trajectory that took it.

        `prompt_ids` are all tokens of the request, those of earlier turns included; `completion_ids` are the sampled
        tokens, and `logprobs` has the engine's log-prob of each of them.

        `routes` are the rows [start, prompt + completion - 1). They may be None if nothing was
        generated (an abort before the first token). Rows that are already known are kept, because the
        log-probs were sampled with them. `version` is the policy version of rows that do not carry
        their own, and of the sampled tokens unless `versions` has one for each of them. `allow_gap`
        accepts a response whose rows leave a gap; the rows of the gap stay uncaptured.

        The prompt must extend the tokens so far. If it does not, StitchError names the first
        difference; with `branch=True` the response goes to a new Trajectory that shares the rows of
        the common prefix. Its loss mask is 0 there: those tokens are trained where they were sampled.
        """
        prompt = int64_array(prompt_ids, "prompt_ids", StitchError)
        completion = int64_array(completion_ids, "completion_ids", StitchError)
        sampled_logprobs = _logprob_array(logprobs, len(completion))
        start, version = exact_int(start, "start", StitchError), exact_int(version, "version", StitchError)
        sampled_versions = _version_array(version if versions is None else versions, len(completion))
        if not len(prompt):
            raise StitchError("prompt_ids must have at least one token, got none")
        same = self._common_prefix(prompt)
        target = self
        if same < len(self._tokens):
            if not branch:
                raise StitchError(self._difference(prompt, same))
            target = self._branch(same)
        rows = target._fitting_rows(routes, start, len(prompt), len(completion), allow_gap)
        if rows is not None and rows.version_runs is None:
            rows = rows.with_versions(version)
        target._take(prompt[same:], completion, sampled_logprobs, sampled_versions, rows, start)
        return target

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens with their log-probs, loss mask and rows; drop the rest.

        Use it for an answer that is cut after it was sampled, such as at a stop string or a length limit. `length`
        is an integer in [0, len(self)]; anything else raises StitchError and changes nothing.

        Kept rows stay captured, with their versions, because a row depends only on the tokens up to its own. So the
        row of the last token may be known here, while after `append` it is not; `next_start` is at most `length`, and
        rows that a later response repeats are ignored as always. Branches of this trajectory, and arrays or routes
        that were read before, keep all their tokens.
        """
        length = exact_int(length, "length", StitchError)
        if length > len(self):
            raise StitchError(
                f"length must be at most {len(self)}, the number of tokens of the trajectory, got {length}"
            )
        for array in (self._tokens, self._logprobs, self._loss_mask, self._versions):
            array.truncate(length)
        self._rows = self._rows.share(length)

    # -- reading --------------------------------------------------------------------------------

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens so far, prompts and completions, int64 and read-only."""
        return self._tokens.view

    @property
    def logprobs(self) -> np.ndarray:
        """The rollout engine's log-prob of each sampled token, float32; 0.0 where loss_mask is False."""
        return self._logprobs.view

    @property
    def loss_mask(self) -> np.ndarray:
        """True where the policy sampled the token."""
        return self._loss_mask.view

    @property
    def versions(self) -> np.ndarray:
        """The policy version that sampled each token, int64; 0 where loss_mask is False."""
        return self._versions.view

    @property
    def routes(self) -> Routes:
        """One row per token; rows that were not supplied yet, such as the last, are uncaptured."""
        return self._rows.view(len(self._tokens))

    @property
    def next_start(self) -> int:
        """The number of rows that the engine may leave out of its next response: all before the first unknown one."""
        return self._rows.first_missing

    def start_for(self, prompt_ids: ArrayLike) -> int:
        """Return how many rows a response to `prompt_ids` may leave out: the known rows of the tokens that it repeats.

        The row of the last prompt token is always requested: engines return it in any case.
        """
        prompt = int64_array(prompt_ids, "prompt_ids", StitchError)
        return max(0, min(self.next_start, self._common_prefix(prompt), len(prompt) - 1))

    def common_prefix(self, prompt_ids: ArrayLike) -> int:
        """Return how many tokens `prompt_ids` and this trajectory have in common at their beginning."""
        return self._common_prefix(int64_array(prompt_ids, "prompt_ids", StitchError))

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"Trajectory({len(self)} tokens, {int(self.loss_mask.sum())} sampled, next_start={self.next_start})"

    # -- the work -------------------------------------------------------------------------------

    def _common_prefix(self, prompt: np.ndarray) -> int:
        """Return how many of this trajectory's tokens the prompt repeats."""
        shared = min(len(prompt), len(self._tokens))
        differs = prompt[:shared] != self.token_ids[:shared]
        return int(differs.argmax()) if differs.any() else shared

    def _difference(self, prompt: np.ndarray, at: int) -> str:
        advice = "keep the earlier tokens (do not tokenise them again), or pass branch=True to start a new branch there"
        if at == len(prompt):
            return f"the prompt ends at position {at}, but must extend the {len(self._tokens)} tokens so far: {advice}"
        return (
            f"the prompt does not extend the trajectory: at position {at} of {len(self._tokens)} expected token "
            f"{self.token_ids[at]}, got {prompt[at]}: {advice}"
        )

    def _branch(self, stop: int) -> Trajectory:
        other = Trajectory(self.spec)
        other._tokens.extend(self.token_ids[:stop])
        other._logprobs.extend(np.zeros(stop, np.float32))
        other._loss_mask.extend(np.zeros(stop, bool))
        other._versions.extend(np.zeros(stop, np.int64))
        other._rows = self._rows.share(stop)
        return other

    def _fitting_rows(
        self, routes: Routes | None, start: int, prompt: int, completion: int, allow_gap: bool
    ) -> Routes | None:
        if routes is None:
            if completion and not allow_gap:
                raise StitchError(
                    f"the response has {completion} sampled tokens but no routes: switch on capture in the engine, or "
                    "pass allow_gap=True to leave their rows uncaptured"
                )
            return None
        if not isinstance(routes, Routes):
            raise StitchError(
                f"routes must be a Routes, got {type(routes).__name__}; make one with Routes.from_engine or wire.from_*"
            )
        if routes.spec != self.spec:
            raise StitchError(f"routes are of another model: expected {self.spec}, got {routes.spec}")
        end = row_count(prompt, completion)
        if start > end:
            raise StitchError(f"start must be an integer in [0, {end}] for {prompt} + {completion} tokens, got {start}")
        if len(routes) != end - start:
            raise StitchError(
                f"expected {end - start} rows (prompt {prompt} + completion {completion} - 1 - start {start}), "
                f"got {len(routes)}: "
                + (
                    "this is the number of all rows; if the engine left none out, pass start=0"
                    if len(routes) == end
                    else "the rows do not belong to the tokens of this response"
                )
            )
        known = len(self._rows)
        if start > known and not allow_gap:
            raise StitchError(
                f"rows [{known}, {start}) are missing: the response starts at row {start}, the trajectory has rows "
                f"up to {known}; request rows from next_start={self.next_start} on, or pass allow_gap=True"
            )
        return routes

    def _take(
        self,
        environment: np.ndarray,
        completion: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        rows: Routes | None,
        start: int,
    ) -> None:
        """Store a checked response. Nothing raises here, so a response is stored completely or not at all."""
        self._tokens.extend(environment, completion)
        self._logprobs.extend(np.zeros(len(environment), np.float32), logprobs)
        self._loss_mask.extend(np.zeros(len(environment), bool), np.ones(len(completion), bool))
        self._versions.extend(np.zeros(len(environment), np.int64), versions)
        if rows is None:
            return
        known = len(self._rows)
        if start > known:
            self._rows.append(Routes.missing(start - known, self.spec))
        elif start < known:
            self._rows.fill(rows, start)
        fresh = rows[max(0, known - start) :]
        # A slice would keep the whole response alive; over many turns that is quadratic memory.
        self._rows.append(fresh if len(fresh) == len(rows) else fresh.copy())


def _logprob_array(logprobs: Any, tokens: int) -> np.ndarray:
    array = float32_array(logprobs, "logprobs", StitchError)
    if array.shape != (tokens,):
        raise StitchError(f"logprobs must be {tokens} numbers, one per completion token, got {list(array.shape)}")
    refuse_not_finite(array, "logprobs of the completion", StitchError)
    return array


def _version_array(versions: Any, tokens: int) -> np.ndarray:
    if isinstance(versions, int):
        return np.full(tokens, versions, np.int64)
    array = int64_array(versions, "versions", StitchError)
    if array.shape != (tokens,):
        raise StitchError(f"versions must be {tokens} integers, one per completion token, got {list(array.shape)}")
    return array
