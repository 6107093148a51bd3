"""Tracks a request in the embedded engine: its samples, their output so far, and their Completions.

Shapes: T prompt tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Collection

import numpy as np

from router_replay.engines.types import Completion, FinishReason, Request
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

RESOLUTION = 1 << 40  # coarser than float64 rounding near 1, finer than any probability that matters


class Flight:
    """Holds one request and its future. The flight has landed when the future has a result or an error."""

    def __init__(self, request: Request, end_of_sequence: Collection[int], max_length: int) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = list(request.token_ids)  # checked: plain integers
        self.stop = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_of_sequence)}
        self.max_tokens = min(sampling.max_tokens, max_length - len(self.tokens))
        self.future: concurrent.futures.Future[list[Completion]] = concurrent.futures.Future()
        self.samples = [Sample(self, index) for index in range(sampling.n)]
        self.landed = False

    def fail(self, error: Exception) -> None:
        """Answer the request with an error."""
        self._end()
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # its caller has cancelled it
            self.future.set_exception(error)

    def land(self, spec: RouterSpec) -> list[Completion]:
        """Answer the request with its output so far and return it; an unfinished sample is marked as aborted.

        If no valid answer can be built, only this request fails.
        """
        samples = self._end()
        try:
            completions = [sample.completion(spec) for sample in samples]
        except Exception as error:
            failure = EngineError(f"{self.request.id}: building the answer failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)
            return []
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(completions)
        return completions

    def _end(self) -> list[Sample]:
        """Take the samples, which know their flight: with them it would stay in memory until a garbage collection."""
        samples, self.samples, self.landed = self.samples, [], True
        return samples


class Sample:
    """Holds the state of one of the n samples of a request."""

    def __init__(self, flight: Flight, index: int) -> None:
        self.flight = flight
        self.index = index
        seed = flight.request.sampling.seed
        self._random = np.random.default_rng(None if seed is None else seed + index)
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._rows: list[np.ndarray] = []  # the prompt's [T, L, K], then one [1, L, K] per token that was forwarded
        self.finish: FinishReason | None = None

    def uniform(self) -> float:
        """Return the next random number in [0, 1) of this sample's own generator."""
        return int(self._random.integers(RESOLUTION)) / RESOLUTION

    def take(self, rows: np.ndarray, token: int, logprob: float, version: int) -> None:
        """Add the results of one pass: the computed rows and the sampled token with its log-prob and version."""
        self._rows.append(rows)
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if token in self.flight.stop:
            self.finish = "stop"
        elif len(self.tokens) >= self.flight.max_tokens:
            self.finish = "length"

    def completion(self, spec: RouterSpec) -> Completion:
        """Return the output so far. An unfinished sample has the finish reason "abort"."""
        request = self.flight.request
        routes = Routes(np.concatenate(self._rows)[request.start :], spec) if self.tokens else None
        return Completion.assemble(
            request,
            self.index,
            spec=spec,
            token_ids=self.tokens,
            logprobs=self._logprobs,
            routes=routes,
            versions=self._versions,
            finish_reason=self.finish or "abort",
        )
