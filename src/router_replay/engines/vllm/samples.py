"""Converts vLLM's answers: samples, the progress of each request at a weight change, and the Completions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from router_replay.engines import checks
from router_replay.engines.backend import Flight
from router_replay.engines.types import Completion
from router_replay.errors import EngineError
from router_replay.routes import Routes, row_count
from router_replay.spec import RouterSpec

_OURS = re.compile(r"^(?:(\d+)_)?.*?(rr-[0-9a-f]{32})")


@dataclasses.dataclass
class Sample:
    """Holds one choice of a vLLM response. `rows` is None if nothing was computed."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rows: Routes | None
    finish_reason: str | None


def progress_of(reported: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return the computed rows by our names and sample indices, from a worker's report by vLLM's internal ids."""
    found: dict[str, dict[int, int]] = {}
    if not isinstance(reported, Mapping):
        raise EngineError(f"expected the worker's progress as a table of requests, got {checks.shown(reported)}")
    for internal, rows in reported.items():
        checks.integer(rows, "the number of rows that a worker computed for a request", 0, checks.TOKEN_LIMIT)
        match = _OURS.match(internal)
        if match:
            found.setdefault(match.group(2), {})[int(match.group(1) or 0)] = rows
    return found


def progress_of_all(reports: Sequence[Mapping[str, int]]) -> dict[str, dict[int, int]]:
    """Merge the progress that the workers of all ranks report, in the form of `progress_of`.

    Data-parallel ranks report different requests. Tensor-parallel ranks compute the same ones, and must agree.
    """
    merged: dict[str, dict[int, int]] = {}
    for reported in reports:
        for name, samples in progress_of(reported).items():
            known = merged.setdefault(name, {})
            for index, rows in samples.items():
                if known.setdefault(index, rows) != rows:
                    raise EngineError(
                        f"two workers computed {known[index]} and {rows} rows of one request: the ranks do not agree"
                    )
    return merged


def completion_of(sample: Sample, flight: Flight, spec: RouterSpec, vocabulary: int | None = None) -> Completion:
    """Build a checked Completion. Raises EngineError if the parts of a response do not fit together."""
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
