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

from router_replay.engines import checks
from router_replay.engines.types import Completion, Request
from router_replay.errors import EngineError
from router_replay.routes import Routes, row_count
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
    rows = row_count(len(request.token_ids), len(sample.token_ids))
    return Completion.assemble(
        request,
        sample.index,
        spec=spec,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        routes=sample.rows,
        versions=flight.row_versions(sample.index, rows),
        finish_reason=sample.finish_reason,
        vocabulary=vocabulary,
    )
