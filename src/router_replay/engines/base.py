"""Defines the protocol of all engines: they take tokens and sampling parameters and return tokens with their Routes.

    engine = ...                                              # embedded, vLLM in process, vLLM over HTTP, SGLang
    [completion] = engine.generate([Request((5, 6, 7), Sampling(max_tokens=8))])
    trajectory.add(request, completion)

A completion also has the log-probs of its tokens. The methods may be called from any thread.
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
    """Describes weights in memory that the engine can map, such as `engines.vllm.weights.SharedWeights`."""

    def info(self) -> dict[str, Any]:
        """Return where the tensors are, ready for JSON: the engine maps them from this."""
        ...


# A Hugging Face folder, shared memory, or a state dict. Each engine refuses the kinds that it does not support.
WeightSource: TypeAlias = str | os.PathLike[str] | SharedTensors | Mapping[str, Any]


PAUSED_FINISHES_NOTHING = (
    "in_flight='wait' would never return, because a paused engine finishes no request: call resume() first, or pass "
    "in_flight='abort' or 'keep'"
)


def check_in_flight(in_flight: InFlight) -> InFlight:
    """Return `in_flight`. Raises EngineError if it is not one of the three choices."""
    if in_flight not in get_args(InFlight):
        raise EngineError(f"in_flight must be one of {get_args(InFlight)}, got {checks.shown(in_flight)}")
    return in_flight


class Engine(abc.ABC):
    """Represents a running engine. It is thread-safe: a training loop may swap weights while rollouts run.

    `spec` describes the routers of its model, `capabilities` says what the engine can do, and `version` is the policy
    version of its weights.
    """

    spec: RouterSpec
    capabilities: Capabilities
    version: int
    vocabulary: int | None = None
    """The vocabulary size of the model, if known: token ids outside it are neither sent nor accepted."""

    def _checked(self, request: Request) -> Request:
        """Return the request in plain values. Raises EngineError if this engine's model cannot take it."""
        if not isinstance(request, Request):
            raise EngineError(f"expected a router_replay.engines.Request, got {checks.shown(request)}")
        return request.check(self.spec, self.capabilities, self.vocabulary)

    def _checked_batch(self, requests: Iterable[Request]) -> list[Request]:
        checked = [self._checked(request) for request in requests]
        for name, count in collections.Counter(request.id for request in checked).items():
            if count > 1:
                raise EngineError(f"{name}: {count} requests of one batch have this id: give every request a unique id")
        return checked

    @abc.abstractmethod
    async def submit(self, request: Request) -> list[Completion]:
        """Generate and return all n samples of one `request`.

        After an abort, the partial samples are returned with finish_reason "abort".
        """

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Generate and return all samples of all `requests` in one list, in the order of the requests."""
        return [completion for samples in self.generate_each(requests) for completion in samples]

    def generate_each(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """Generate and return one list of samples for each of the `requests`. Must not be called in an event loop.

        Raises EngineError for the whole batch if one request is invalid, before any request is sent.
        """
        checked = self._checked_batch(requests)

        async def all_of_them() -> list[list[Completion]]:
            return await asyncio.gather(*(self.submit(request) for request in checked))

        return asyncio.run(all_of_them())

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort the given requests, or all if `request_ids` is None, and return their partial completions.

        The `submit` calls of these requests return the same completions.
        """

    @abc.abstractmethod
    def pause(self, in_flight: InFlight = "keep") -> None:
        """Stop generating. Requests that are submitted later wait for `resume`.

        `in_flight` says what happens to running requests: "abort" ends them with their output so far, "keep" holds
        them until `resume`, and "wait" lets them finish first.
        """

    @abc.abstractmethod
    def resume(self) -> None:
        """Continue after a `pause`: kept requests go on, and waiting requests start."""

    @abc.abstractmethod
    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        """Load new weights in place and reset the caches of the old ones.

        `source` is a Hugging Face folder for any engine; vLLM also takes shared memory, the embedded engine a state
        dict, and a stock vLLM server on a GPU the tensors of `checkpoint_tensors`. `version` is the policy version of
        the new weights. `in_flight` says what happens to running requests, as in `pause`: "abort", "keep" or "wait".
        The callers of aborted requests may get their answers after this call has returned.
        """

    def ping(self) -> None:  # noqa: B027  an engine without this is never found dead
        """Raise EngineError with the reason if the engine does not answer, or cannot generate any more."""

    @abc.abstractmethod
    def close(self) -> None:
        """Shut the engine down. Requests in flight fail with EngineError, and so does every later call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
