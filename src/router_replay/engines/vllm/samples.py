"""What vLLM answers: samples, the versions of their rows, and the Completion of each.

Row i of a request belongs to position i; the token at position p was sampled by the pass that computed row
p - 1, so the policy version of a token is the version of that row. One list of spans says it all:

    spans = [(0, 3), (41, 4)]      rows 0..40 were computed by version 3, rows from 41 on by version 4
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import uuid
from collections.abc import Mapping, Sequence

import numpy as np

from router_replay import kernel
from router_replay.engines import checks
from router_replay.engines.types import Completion, FinishReason, Request
from router_replay.engines.vllm.requests import EXTRA_ARGUMENT
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

_OURS = re.compile(r"^(?:(\d+)_)?.*?(rr-[0-9a-f]{32})")


@dataclasses.dataclass
class Sample:
    """One choice of a vLLM response. `rows` is None where nothing was computed."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rows: Routes | None
    finish_reason: str | None


class Flight:
    """A request on its way: what vLLM calls it, and which version computed which of its rows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.name = f"rr-{uuid.uuid4().hex}"
        self.salt = ""  # of the weights: the prefix cache knows tokens only
        self.started = False
        self.stopped = asyncio.Event()  # aborted, perhaps before it started
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._spans: list[list[tuple[int, int]]] = []

    def start(self, version: int, salt: str) -> None:
        self.started, self.salt = True, salt
        self._spans = [[(0, version)] for _ in range(self.request.sampling.n)]

    def swap(self, computed: Mapping[int, int], version: int) -> None:
        """The weights change: `computed[index]` rows of sample `index` exist; what is not there did not start."""
        for index, spans in enumerate(self._spans):
            first = computed.get(index, 0)
            self._spans[index] = [span for span in spans if span[0] < first] + [(first, version)]

    def row_versions(self, index: int, rows: int) -> np.ndarray:
        versions = np.zeros(rows, np.int64)
        for first, version in self._spans[index]:
            versions[first:] = version
        return versions


def progress_of(reported: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Rows computed by our names and sample indices, from what a worker reports by vLLM's internal ids."""
    found: dict[str, dict[int, int]] = {}
    if not isinstance(reported, Mapping):
        raise EngineError(f"the worker's progress is not a table of requests: {checks.shown(reported)}")
    for internal, rows in reported.items():
        checks.integer(rows, "the rows that a worker computed", 0, checks.TOKEN_LIMIT)
        match = _OURS.match(internal)
        if match:
            found.setdefault(match.group(2), {})[int(match.group(1) or 0)] = rows
    return found


def completion_of(sample: Sample, flight: Flight, spec: RouterSpec, vocabulary: int | None = None) -> Completion:
    """A checked Completion, or EngineError where the parts of a response do not fit each other."""
    request = flight.request
    prompt, tokens, start = len(request.token_ids), len(sample.token_ids), request.routes_start
    rows = prompt + tokens - 1
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if sample.finish_reason not in reasons:
        raise EngineError(f"{request.id}: vLLM ended the request with finish_reason {sample.finish_reason!r}")
    versions = flight.row_versions(sample.index, rows)
    routes = Routes.missing(rows - start if tokens else 0, spec) if sample.rows is None else sample.rows
    if tokens and len(routes) == rows - start:
        routes = _with_versions(routes, request, versions)
    return Completion(
        request_id=request.id,
        index=sample.index,
        token_ids=np.asarray(sample.token_ids, np.int64),
        logprobs=np.asarray(sample.logprobs, np.float32),
        routes=routes if tokens else routes[:0],
        start=start,
        finish_reason=reasons[sample.finish_reason],
        versions=versions[prompt - 1 :] if tokens else np.zeros(0, np.int64),
    ).check(prompt, vocabulary, request.sampling.max_tokens)


def _with_versions(routes: Routes, request: Request, versions: np.ndarray) -> Routes:
    """Forced rows keep the version that routed them first; that the engine used them is checked here."""
    start, forced = request.routes_start, request.forced_routes
    if forced is not None and len(forced) > start:
        given = forced[start:]
        captured = given.captured
        returned = routes[: len(given)]
        # Where the engine chose the same set by itself, it keeps its own slot order.
        same = kernel.sort_sets(returned.ids[captured]) == kernel.sort_sets(given.ids[captured])
        if not same.all():
            row = start + int(np.flatnonzero(captured)[np.argwhere(~same)[0][0]])
            raise EngineError(
                f"{request.id}: the engine did not use the forced experts of row {row}. Is its plugin active "
                f"(extra_args.{EXTRA_ARGUMENT})? engine.report() says what the worker did"
            )
        versions = versions.copy()
        versions[start : len(forced)][captured] = given.versions[captured]
    return routes.with_versions(versions[start:])
