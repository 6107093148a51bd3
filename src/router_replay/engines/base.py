"""One protocol for every engine: tokens and sampling parameters in, tokens, log-probs and Routes out.

    engine = ...                                              # embedded, vLLM in process, vLLM over HTTP, SGLang
    [completion] = engine.generate([Request((5, 6, 7), Sampling(max_tokens=8))])
    trajectory.add(request, completion)

Calls may come from any thread.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self, TypeAlias, get_args, runtime_checkable

from router_replay.engines import checks
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.engines.types import Sampling as Sampling
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec


@runtime_checkable
class SharedTensors(Protocol):
    """Weights in memory that the engine can map; `engines.vllm.weights.SharedWeights` is one."""

    def info(self) -> dict[str, Any]: ...


# A Hugging Face folder, shared memory, or a state dict. Each engine refuses what it cannot take.
WeightSource: TypeAlias = str | os.PathLike[str] | SharedTensors | Mapping[str, Any]


PAUSED_FINISHES_NOTHING = "a paused engine finishes nothing: resume it, or choose in_flight='abort' or 'keep'"


def check_in_flight(in_flight: InFlight) -> InFlight:
    if in_flight not in get_args(InFlight):
        raise EngineError(f"in_flight must be one of {get_args(InFlight)}, got {checks.shown(in_flight)}")
    return in_flight


class Engine(abc.ABC):
    """A running engine. Thread-safe: a training loop may swap weights while rollouts run."""

    spec: RouterSpec
    capabilities: Capabilities
    version: int
    vocabulary: int | None = None
    """The number of token ids of its model, where that is known: others are neither sent nor taken."""

    def _checked(self, request: Request) -> Request:
        """The request in plain values, if this engine's model can take it."""
        if not isinstance(request, Request):
            raise EngineError(f"engines take a Request, got {checks.shown(request)}")
        return request.check(self.spec, self.capabilities, self.vocabulary)

    def _checked_batch(self, requests: Iterable[Request]) -> list[Request]:
        checked = [self._checked(request) for request in requests]
        for name, count in collections.Counter(request.id for request in checked).items():
            if count > 1:
                raise EngineError(f"{name}: a request of this id is in flight; give each an id of its own")
        return checked

    @abc.abstractmethod
    async def submit(self, request: Request) -> list[Completion]:
        """All n samples of one request. An abort makes it return what there is, with finish_reason "abort"."""

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """All samples of all requests in one list, in the order of the requests."""
        return [completion for samples in self.generate_each(requests) for completion in samples]

    def generate_each(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """One list of samples per request. Must not be called inside an event loop.

        One bad request refuses the whole batch before any of it is sent.
        """
        checked = self._checked_batch(requests)

        async def all_of_them() -> list[list[Completion]]:
            return await asyncio.gather(*(self.submit(request) for request in checked))

        return asyncio.run(all_of_them())

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Stop some requests, or all; returns their partial completions, as `submit` does."""

    @abc.abstractmethod
    def pause(self, in_flight: InFlight = "keep") -> None:
        """Stop generating. Requests in flight are aborted, kept for later, or waited for."""

    @abc.abstractmethod
    def resume(self) -> None: ...

    @abc.abstractmethod
    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        """Load new weights in place, and reset what the old ones cached.

        Every engine takes a Hugging Face folder; vLLM also shared memory, the embedded engine also a state dict.
        """

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
