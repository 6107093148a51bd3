"""Defines the inputs and outputs of an engine: Sampling, Request, Completion, Capabilities.

Row i of `completion.routes` belongs to position `completion.start + i` of prompt + completion. The last sampled token
was never forwarded and has no row.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import ArrayLike

from router_replay import kernel
from router_replay.engines import checks
from router_replay.errors import EngineError
from router_replay.routes import Routes, row_count
from router_replay.spec import RouterSpec

FinishReason = Literal["stop", "length", "abort"]
InFlight = Literal["abort", "keep", "wait"]
MOST_SAMPLES = 1 << 14  # of one request; vLLM's own limit
# A sampled token has a probability of at most 1. Log-softmax rounds by 1e-6 in float32 and by less than this in shorter
# types, so a value in between is kept as it came.
HIGHEST_LOGPROB = 1e-3
LOWEST_LOGPROB = -9999.0  # what vLLM's server writes for minus infinity: nobody samples a token of probability 0
_numbers = itertools.count()
_NEW_ID = "".join(["new ", "id"])  # compared by identity: nobody else has this object


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Holds the sampling parameters of a request.

    `max_tokens` is the largest number of tokens to sample. `temperature` divides the logits; 0 always takes the most
    likely token. `top_p`, in (0, 1], limits sampling to the most likely tokens that together have this probability.
    `seed` makes the samples reproducible: sample i uses seed + i. Sampling ends after one of `stop_token_ids` or,
    unless `ignore_eos` is set, after the model's own end-of-sequence token. `n` is the number of samples.

    The returned log-probs are those of the distribution at `temperature`. With `top_p` below 1, SGLang and the
    embedded engine return them before the top-p cut, and vLLM after it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def check(self, place: str, vocabulary: int | None = None) -> Sampling:
        """Return a copy in plain Python numbers. Raises EngineError that names the invalid field.

        `place` is where the values come from, for the error: usually the request id. `vocabulary` is the vocabulary
        size, if known: a stop token outside it is refused.
        """
        n = checks.integer(self.n, f"{place}: n", 1, MOST_SAMPLES + 1)
        temperature = checks.number(self.temperature, f"{place}: temperature")
        top_p = checks.number(self.top_p, f"{place}: top_p")
        if temperature < 0 or not 0 < top_p <= 1:
            raise EngineError(
                f"{place}: temperature must be at least 0 and top_p must lie in (0, 1], got {temperature} and {top_p}"
            )
        seed = self.seed
        if seed is not None:  # sample i of a request gets seed + i, and engines keep seeds in int64
            seed = checks.integer(seed, f"{place}: seed", 0, (1 << 63) - n)
        return Sampling(
            max_tokens=checks.integer(self.max_tokens, f"{place}: max_tokens", 1, checks.TOKEN_LIMIT),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=checks.tokens(self.stop_token_ids, f"{place}: stop_token_ids", vocabulary),
            ignore_eos=checks.flag(self.ignore_eos, f"{place}: ignore_eos"),
            n=n,
        )


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Request:
    """Holds one prompt, `token_ids`, and how to sample from it, `sampling`.

    Rows before position `start` are not returned, because the caller already has them. `forced_routes` are rows
    [0, len) of the prompt that the engine must use instead of its own choice (to continue an aborted rollout);
    positions beyond them, and uncaptured rows, are routed live. `known_routes` are the rows [0, len) of the prompt that
    the caller has from earlier turns; a pool forces them if it moves the conversation to another engine. `id` names the
    request in `abort`, in completions and in errors; it must be unique among the requests in flight, and is created if
    it is not given.
    """

    token_ids: Sequence[int]
    sampling: Sampling
    start: int
    forced_routes: Routes | None
    id: str
    known_routes: Routes | None

    def __init__(
        self,
        token_ids: Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        start: int = 0,
        forced_routes: Routes | None = None,
        id: str = _NEW_ID,
        *,
        known_routes: Routes | None = None,
        routes_start: int | None = None,
    ) -> None:
        """`routes_start` is the old name of `start`."""
        if routes_start is not None:
            warnings.warn(
                "the argument routes_start of Request is now called start: pass start= instead",
                DeprecationWarning,
                stacklevel=2,
            )
            start = routes_start
        put = object.__setattr__  # the class is frozen
        put(self, "token_ids", token_ids)
        put(self, "sampling", sampling)
        put(self, "start", start)
        put(self, "forced_routes", forced_routes)
        put(self, "id", f"request-{next(_numbers)}" if id is _NEW_ID else id)
        put(self, "known_routes", known_routes)

    @property
    def routes_start(self) -> int:
        """The old name of `start`."""
        warnings.warn("Request.routes_start is now called start: read .start instead", DeprecationWarning, stacklevel=2)
        return self.start

    def check(self, spec: RouterSpec, capabilities: Capabilities, vocabulary: int | None = None) -> Request:
        """Return the request in plain Python values. Raises EngineError with the reason if it is invalid.

        `spec` and `capabilities` are those of the engine, and `vocabulary` is its vocabulary size, if known.
        """
        if not isinstance(self.id, str) or not self.id:
            raise EngineError(f"a request id must be a non-empty string, got {checks.shown(self.id)}")
        if not isinstance(self.sampling, Sampling):
            raise EngineError(f"{self.id}: sampling must be a Sampling, got {checks.shown(self.sampling)}")
        token_ids = checks.tokens(self.token_ids, f"{self.id}: the prompt", vocabulary)
        tokens = len(token_ids)
        if not tokens:
            raise EngineError(f"{self.id}: the prompt is empty, expected at least one token id")
        start = checks.integer(self.start, f"{self.id}: start", -checks.TOKEN_LIMIT, checks.TOKEN_LIMIT)
        if not 0 <= start <= tokens - 1:
            raise EngineError(
                f"{self.id}: start must lie in [0, {tokens - 1}] for a prompt of {tokens} tokens "
                f"(the last prompt row is always returned), got {start}"
            )
        sampling = self.sampling.check(self.id, vocabulary)
        if isinstance(self.forced_routes, Routes) and not capabilities.forced_routes:
            raise EngineError(
                f"{self.id}: this engine cannot force routes: {capabilities.why_not}. Leave forced_routes out"
            )
        self._check_rows(self.forced_routes, "forced", spec, tokens)
        self._check_rows(self.known_routes, "known", spec, tokens)
        return Request(token_ids, sampling, start, self.forced_routes, self.id, known_routes=self.known_routes)

    def _check_rows(self, rows: Routes | None, kind: str, spec: RouterSpec, tokens: int) -> None:
        """Raise EngineError unless these are rows of the prompt. `kind` is "forced" or "known"."""
        if rows is None:
            return
        if not isinstance(rows, Routes):
            raise EngineError(f"{self.id}: {kind}_routes must be Routes, got {checks.shown(rows)}")
        if rows.spec != spec:
            raise EngineError(f"{self.id}: {kind}_routes are those of another model: expected {spec}, got {rows.spec}")
        if len(rows) > tokens:
            raise EngineError(
                f"{self.id}: {len(rows)} {kind} rows for a prompt of {tokens} tokens, expected at most one row for "
                "each prompt token"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """Holds the result for one sample of one request, complete or up to an abort.

    `request_id` is the id of the request, and `index` is the number of the sample, from 0 to n - 1. `token_ids` are
    the sampled tokens, and `logprobs` their log-probs. `routes` are the experts of prompt and completion from
    position `start` on, except for the last sampled token, which was not forwarded. `finish_reason` is "stop" (a stop
    token), "length" (max_tokens, or the model's limit) or "abort". `versions[i]` is the policy version that sampled
    token i; a weight swap in flight gives more than one version.
    """

    request_id: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    routes: Routes
    start: int
    finish_reason: FinishReason
    versions: np.ndarray

    @classmethod
    def assemble(
        cls,
        request: Request,
        index: int,
        *,
        spec: RouterSpec,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | np.ndarray,
        routes: Routes | None,
        versions: ArrayLike,
        finish_reason: str | None,
        start: int | None = None,
        vocabulary: int | None = None,
    ) -> Completion:
        """Build a checked Completion of sample `index` from the parts of an answer. All engines use it.

        `spec` describes the routers of the model. `token_ids`, `logprobs` and `finish_reason` are those of the answer.
        `routes` are the rows from `start` on (the request's start by default); None means that none were captured.
        `vocabulary` is the vocabulary size, if known: tokens outside it are refused.
        `versions` apply to the last rows; earlier rows get the first given version. The token at position p was
        sampled by the pass that computed row p - 1, so the versions of tokens and of rows end alike, and one number
        per token is enough. Forced rows keep the version that first routed them.

        Raises EngineError if the parts do not fit together or the forced rows were not returned.
        """
        if finish_reason not in get_args(FinishReason):
            raise EngineError(
                f"{request.id}: the engine returned finish_reason {checks.shown(finish_reason)}, expected one of "
                f"{list(get_args(FinishReason))}"
            )
        prompt, tokens = len(request.token_ids), len(token_ids)
        start = request.start if start is None else start
        row_versions = np.zeros(0, np.int64)
        if not tokens:  # no row is returned without a token
            routes = Routes.missing(0, spec)
        else:
            row_versions = _row_versions(versions, row_count(prompt, tokens), request.id)
            expected = row_count(prompt, tokens, start)
            routes = Routes.missing(expected, spec) if routes is None else routes
            if len(routes) == expected:  # any other number is refused by `check`
                routes = _with_versions(routes, request, row_versions, start)
        return cls(
            request_id=request.id,
            index=index,
            token_ids=np.asarray(token_ids, np.int64),
            logprobs=np.asarray(logprobs, np.float32),
            routes=routes,
            start=start,
            finish_reason=cast(FinishReason, finish_reason),
            versions=row_versions[prompt - 1 :] if tokens else row_versions,
        ).check(prompt, vocabulary, request.sampling.max_tokens)

    @classmethod
    def nothing(cls, request: Request, spec: RouterSpec) -> list[Completion]:
        """Return n empty samples, the result of aborting a `request` that never started.

        `spec` describes the routers of the model.
        """
        return [
            cls.assemble(
                request, index, spec=spec, token_ids=(), logprobs=(), routes=None, versions=(), finish_reason="abort"
            )
            for index in range(request.sampling.n)
        ]

    def check(self, prompt_tokens: int, vocabulary: int | None = None, max_tokens: int | None = None) -> Completion:
        """Check this completion and return it. Raises EngineError if it is incomplete or invalid.

        Tokens, log-probs, versions and rows must match in number, for a prompt of `prompt_tokens` tokens. Tokens must
        be in the `vocabulary` and at most `max_tokens` in number, where these are given, and log-probs must be those
        of tokens that can be sampled.
        """
        tokens = len(self.token_ids)
        rows = row_count(prompt_tokens, tokens, self.start)
        if len(self.logprobs) != tokens or len(self.versions) != tokens:
            raise EngineError(
                f"{self.request_id}: the answer has {tokens} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions, expected one log-prob and one version for each token"
            )
        if max_tokens is not None and tokens > max_tokens:
            raise EngineError(f"{self.request_id}: expected at most {max_tokens} tokens (max_tokens), got {tokens}")
        if tokens and len(self.routes) != rows:
            raise EngineError(
                f"{self.request_id}: expected {rows} rows (prompt {prompt_tokens} + completion {tokens} - 1 - start "
                f"{self.start}), got {len(self.routes)}"
            )
        if tokens:
            self._check_values(checks.TOKEN_LIMIT if vocabulary is None else vocabulary)
        return self

    def _check_values(self, vocabulary: int) -> None:
        bad = np.flatnonzero((self.token_ids < 0) | (self.token_ids >= vocabulary))
        if len(bad):
            raise EngineError(
                f"{self.request_id}: sampled token {bad[0]} is {self.token_ids[bad[0]]}, the vocabulary is "
                f"[0, {vocabulary}): the answer was discarded"
            )
        good = (self.logprobs > LOWEST_LOGPROB) & (self.logprobs <= HIGHEST_LOGPROB)  # false for NaN too
        if not good.all():
            place = int(np.flatnonzero(~good)[0])
            raise EngineError(
                f"{self.request_id}: the log-prob of sampled token {place} is {self.logprobs[place]}, expected a "
                f"finite number of at most 0: the answer was discarded"
            )


def _row_versions(versions: ArrayLike, rows: int, place: str) -> np.ndarray:
    given = np.atleast_1d(np.asarray(versions, np.int64))
    if not 0 < len(given) <= rows:
        raise EngineError(f"{place}: the engine gave {len(given)} versions for {rows} rows, expected 1 to {rows}")
    return np.concatenate([np.full(rows - len(given), given[0]), given])


def _with_versions(routes: Routes, request: Request, versions: np.ndarray, start: int) -> Routes:
    """Return the rows from `start` on with their versions; forced rows keep their own versions."""
    forced = request.forced_routes
    if forced is not None and len(forced) > start:
        given = forced[start:]
        captured = given.captured
        returned = routes[: len(given)]
        # If the engine chose the same set by itself, it keeps its own slot order.
        same = kernel.sort_sets(returned.ids[captured]) == kernel.sort_sets(given.ids[captured])
        if not same.all() or not returned.captured[captured].all():
            unused = ~same.all(axis=(1, 2)) | ~returned.captured[captured]
            row = start + int(np.flatnonzero(captured)[unused][0])
            raise EngineError(
                f"{request.id}: the engine did not use the forced experts of row {row}. With vLLM, engine.report() "
                "says whether the plugin is active"
            )
        if given.version_runs is not None:
            versions = versions.copy()
            versions[start : len(forced)][captured] = given.versions[captured]
    return routes.with_versions(versions[start:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Describes what an engine can do; `why_not` says why a feature that users expect is missing.

    `routes`: the engine returns rows. `forced_routes`: the caller can set which experts to use. `start`: rows can be
    left out of an answer. `versions`: weights can be loaded, and each token has the version that sampled it.
    `checked_weights`: the engine checks new weights against its model before it gives up the old ones. `seeds`:
    requests may have a seed. `cannot_keep`: why requests in flight cannot be kept while weights change; empty if they
    can.
    """

    routes: bool
    forced_routes: bool
    start: bool
    versions: bool
    checked_weights: bool = False
    seeds: bool = True
    cannot_keep: str = ""
    why_not: str = ""

    @property
    def prompt_start(self) -> bool:
        """The old name of `start`."""
        warnings.warn(
            "Capabilities.prompt_start is now called start: read .start instead", DeprecationWarning, stacklevel=2
        )
        return self.start
