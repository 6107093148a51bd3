"""One protocol for every engine: tokens and sampling parameters in, tokens, log-probs and Routes out.

    engine = ...                                              # embedded, vLLM in process, vLLM over HTTP, SGLang
    [completion] = engine.generate([Request((5, 6, 7), Sampling(max_tokens=8))])
    trajectory.append(request.token_ids, completion.token_ids, completion.logprobs,
                      completion.routes, completion.start)

Row i of `completion.routes` belongs to position `completion.start + i` of prompt + completion; the last
sampled token was never forwarded and has none.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import numpy as np

from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

FinishReason = Literal["stop", "length", "abort"]
InFlight = Literal["abort", "keep", "wait"]
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    The log-probs that come back are of the distribution at `temperature`. With `top_p` below 1, SGLang and the
    embedded engine give them before the cut, vLLM after it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt. `routes_start` leaves the first rows out of the answer: the caller knows them.

    `forced_routes` are rows [0, len) of the prompt that the engine must use instead of its own choice
    (an aborted rollout that goes on); positions beyond them, and uncaptured rows, are routed live.
    """

    token_ids: Sequence[int]
    sampling: Sampling = Sampling()
    routes_start: int = 0
    forced_routes: Routes | None = None
    id: str = dataclasses.field(default_factory=lambda: f"request-{next(_numbers)}")

    def check(self, spec: RouterSpec, capabilities: Capabilities) -> None:
        """Refuse before anything is sent, with the reason."""
        tokens = len(self.token_ids)
        if not tokens:
            raise EngineError(f"{self.id}: the prompt is empty")
        if not 0 <= self.routes_start <= tokens - 1:
            raise EngineError(
                f"{self.id}: routes_start must lie in [0, {tokens - 1}] for a prompt of {tokens} tokens "
                f"(the last prompt row is always returned), got {self.routes_start}"
            )
        if self.sampling.max_tokens < 1 or self.sampling.n < 1:
            raise EngineError(f"{self.id}: max_tokens and n must be at least 1, got {self.sampling}")
        if self.forced_routes is None:
            return
        if not capabilities.forced_routes:
            raise EngineError(f"{self.id}: this engine cannot be told which experts to use: {capabilities.why_not}")
        if self.forced_routes.spec != spec:
            raise EngineError(f"{self.id}: forced routes of another model: {self.forced_routes.spec}, expected {spec}")
        if len(self.forced_routes) > tokens:
            raise EngineError(f"{self.id}: {len(self.forced_routes)} forced rows for a prompt of {tokens} tokens")


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """What came back for one sample of one request, whole or up to an abort.

    `versions[i]` is the policy version that sampled token i; a weight swap in flight gives more than one.
    """

    request_id: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    routes: Routes
    start: int
    finish_reason: FinishReason
    versions: np.ndarray

    def check(self, prompt_tokens: int) -> Completion:
        """Nothing half-received becomes a sample: tokens, log-probs, versions and rows must fit each other."""
        tokens = len(self.token_ids)
        rows = prompt_tokens + tokens - 1 - self.start
        if len(self.logprobs) != tokens or len(self.versions) != tokens:
            raise EngineError(
                f"{self.request_id}: {tokens} tokens, {len(self.logprobs)} log-probs, {len(self.versions)} versions"
            )
        if tokens and len(self.routes) != rows:
            raise EngineError(
                f"{self.request_id}: expected {rows} rows (prompt {prompt_tokens} + completion {tokens} - 1 - start "
                f"{self.start}), got {len(self.routes)}"
            )
        return self


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What an engine can do; `why_not` says why a thing that users expect is missing."""

    routes: bool
    forced_routes: bool
    prompt_start: bool
    logprobs: bool
    versions: bool
    why_not: str = ""


class Engine(abc.ABC):
    """A running engine. Thread-safe: a training loop may swap weights while rollouts run."""

    spec: RouterSpec
    capabilities: Capabilities
    version: int

    @abc.abstractmethod
    async def submit(self, request: Request) -> list[Completion]:
        """All n samples of one request. An abort makes it return what there is, with finish_reason "abort"."""

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """All samples of all requests, in the order of the requests. Must not be called inside an event loop."""

        async def all_of_them() -> list[list[Completion]]:
            return await asyncio.gather(*(self.submit(request) for request in requests))

        return [completion for samples in asyncio.run(all_of_them()) for completion in samples]

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Stop some requests, or all; returns their partial completions, as `submit` does."""

    @abc.abstractmethod
    def pause(self, in_flight: InFlight = "keep") -> None:
        """Stop generating. Requests in flight are aborted, kept for later, or waited for."""

    @abc.abstractmethod
    def resume(self) -> None: ...

    @abc.abstractmethod
    def update_weights(self, source: str, version: int, in_flight: InFlight = "abort") -> None:
        """Load the weights of a Hugging Face folder in place, and reset what the old ones cached."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
