"""Implements what in-process vLLM and vLLM over HTTP share: samples, versioned weight swaps, and the report.

A `Transport` provides the few calls in which they differ.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from router_replay.engines import checks
from router_replay.engines.backend import Backend, BrokenError, Flight, Progress
from router_replay.engines.base import SharedTensors, WeightSource
from router_replay.engines.remote import RemoteEngine
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.engines.vllm.samples import Sample, completion_of, progress_of_all
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec


class Transport(abc.ABC):
    """Defines the calls to a vLLM engine. They are made only on the client's event loop."""

    spec: RouterSpec
    capabilities: Capabilities
    logprobs_mode: str = "processed_logprobs"
    vocabulary: int | None = None
    cannot_hold: str = ""
    """Why the engine cannot stop computing and keep its requests; empty if it can."""

    @abc.abstractmethod
    async def generate(self, flight: Flight) -> list[Sample]:
        """Generate and return all samples of a request."""

    @abc.abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """Abort the requests that were sent under these names."""

    @abc.abstractmethod
    async def pause(self, mode: InFlight) -> None:
        """Stop the scheduler. `mode` is vLLM's: "abort", "keep" or "wait"."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Start the scheduler again."""

    async def call(self, method: str, **arguments: str) -> dict[str, Any]:
        """Call a method of the plugin in every worker, and return the first worker's answer."""
        [first, *_] = await self.call_all(method, **arguments)
        return first

    @abc.abstractmethod
    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        """Call a method of the plugin in every worker, and return the answers of all workers."""

    @abc.abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Drop all cached KV, and return whether vLLM did so: it does not while requests hold blocks."""

    def dead(self) -> bool:
        """Return whether the engine has died, so that calls could wait forever for an answer."""
        return False

    async def ping(self) -> None:  # noqa: B027  what `dead` says is enough for an engine of this process
        """Raise EngineError if the engine does not answer."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Disconnect, or stop an engine of this process."""

    def backend(self) -> VllmBackend:
        """Return the Backend that uses this transport."""
        return VllmBackend(self)


class VllmBackend(Backend):
    """Implements the Backend calls for a vLLM engine, over a Transport."""

    ends_while_held = True
    aborts_after_load = True
    takes_tensors = False
    """Whether `update_weights` takes tensors by name."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.spec = transport.spec
        self.capabilities = transport.capabilities
        self.vocabulary = transport.vocabulary
        self._updates = 0

    def refuse(self, request: Request) -> None:
        """Raise EngineError for a temperature at which this engine would return log-probs of temperature 1."""
        plain = request.sampling.temperature in (0.0, 1.0)
        if not plain and not self.transport.logprobs_mode.startswith("processed"):
            raise EngineError(
                f"{request.id}: the temperature is {request.sampling.temperature}, but this server returns the "
                "log-probs of temperature 1: start it with --logprobs-mode processed_logprobs (router-replay serve "
                "does), or use temperature 0 or 1"
            )

    async def generate(self, flight: Flight) -> list[Completion]:
        """Generate all samples of a request by one call."""
        request = flight.request
        # The prefix cache only compares tokens, so each update gets a new salt, whatever its version.
        flight.salt = f"router-replay-version-{flight.version}-{self._updates}"
        samples = sorted(await self.transport.generate(flight), key=lambda sample: sample.index)
        if [sample.index for sample in samples] != list(range(request.sampling.n)):
            raise EngineError(
                f"{request.id}: vLLM was asked for {request.sampling.n} samples, got {len(samples)} with indices "
                f"{[sample.index for sample in samples]}"
            )
        for sample in samples:
            if self.capabilities.routes and sample.rows is None and sample.token_ids and not flight.stopped:
                raise EngineError(
                    f"{request.id}: vLLM returned {len(sample.token_ids)} tokens without their experts, although it "
                    "captures them; engine.report() shows the state of the plugin"
                )
        return [completion_of(sample, flight, self.spec, self.vocabulary) for sample in samples]

    async def stop(self, flights: Sequence[Flight]) -> None:
        """Abort these requests; vLLM then answers them with their output so far."""
        await self.transport.abort([flight.name for flight in flights])

    async def hold(self, kept: Sequence[Flight]) -> None:
        """Pause vLLM, which keeps all running requests. Raises EngineError if it cannot keep those in `kept`."""
        if not self.transport.cannot_hold:
            await self.transport.pause("keep")
        elif kept:
            raise EngineError(f"{self.transport.cannot_hold}. Choose in_flight='abort' or 'wait'")
        # Otherwise nothing is held: the requests of this engine have ended, and new ones wait until it resumes.

    async def go(self) -> None:
        """Let vLLM continue."""
        if not self.transport.cannot_hold:
            await self.transport.resume()

    async def find(self, source: WeightSource) -> None:
        """Raise EngineError if one of the workers cannot open these weights, or they do not fit its model."""
        answers = await self.transport.call_all("router_replay_find_weights", source=_told(source))
        for reason in _reasons(answers):
            if reason:
                raise EngineError(reason)

    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Load the weights in every worker, and return the rows that each request had with the old weights."""
        told = _told(source)
        shown = told[:200]
        try:
            answers = await self.transport.call_all("router_replay_update_weights", source=told)
            reasons = _reasons(answers)
        except Exception as error:
            raise broken(
                f"loading the weights of {shown} failed, so it is unknown which weights vLLM has: {error}"
            ) from error
        refused = [reason for reason in reasons if reason]
        if len(refused) == len(reasons):  # the weights existed a moment ago, when `find` ran; nothing was changed
            raise EngineError(refused[0])
        if refused:
            raise broken(f"some workers loaded {shown}, but others refused it: {refused[0]}")
        try:
            progress = progress_of_all([answer.get("progress", {}) for answer in answers])
            # vLLM resets nothing while requests hold blocks. Then the salt of each update separates the old blocks.
            reset = bool(kept) or await self.transport.reset_prefix_cache()
        except Exception as error:  # the new weights are loaded, and would be reported as the old version
            raise broken(f"the weights of {shown} were loaded, but the steps after it failed: {error}") from error
        if not reset:
            raise broken(
                "vLLM did not reset its prefix cache after the weight update, so KV of the old weights would be used"
            )
        self._updates += 1
        return progress

    def dead(self) -> bool:
        """Return whether vLLM's engine core has died."""
        return self.transport.dead()

    async def ping(self) -> None:
        """Raise EngineError if the engine does not answer."""
        await self.transport.ping()

    async def close(self) -> None:
        """Close the transport."""
        await self.transport.close()


class VllmClient(RemoteEngine):
    """Implements what VllmEngine and VllmHttpEngine share; `start` creates the transport on the engine's loop."""

    server = "vLLM"

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, Transport]],
        version: int = 0,
        *,
        allow_zero_layers: bool = False,
    ) -> None:
        async def connect() -> Backend:
            return (await start()).backend()

        super().__init__(connect, version, allow_zero_layers=allow_zero_layers)

    def _source(self, source: WeightSource) -> WeightSource:
        """Check the weights: a folder, a safetensors file, or shared memory from `vllm.weights.share`.

        A stock server also takes tensors by name, which this process sends from its GPU.
        """
        backend = self._connected
        assert isinstance(backend, VllmBackend)
        if isinstance(source, SharedTensors) or (backend.takes_tensors and isinstance(source, Mapping)):
            return source
        return checks.folder(source)

    def report(self) -> dict[str, Any]:
        """Return the report of the plugin in the worker: router rules, number of rows forced so far, its seams."""
        backend = self._connected
        assert isinstance(backend, VllmBackend)
        return self._wait(backend.transport.call("router_replay_report"))

    def gpus(self) -> list[str]:
        """Return the GPU of each worker, by a name that all processes use for it; an empty text for a CPU."""
        backend = self._connected
        assert isinstance(backend, VllmBackend)
        reports = self._wait(backend.transport.call_all("router_replay_report"))
        return [str(report.get("gpu", "")) for report in reports]

    def check_weights(self, source: WeightSource) -> None:
        """Raise EngineError if a worker cannot open the weights of `source`, or they do not fit. Nothing is loaded."""
        backend = self._connected
        assert isinstance(backend, VllmBackend)
        self._wait(backend.find(self._source(source)))


def _told(source: WeightSource) -> str:
    """Return the weight source as the text that the plugin's workers expect."""
    return json.dumps(source.info() if isinstance(source, SharedTensors) else {"path": checks.folder(source)})


def broken(reason: str) -> BrokenError:
    """Return the error for an engine whose weights are unknown, which only a restart repairs."""
    return BrokenError(f"{reason}. Restart vLLM, then create a new engine")


def _reasons(answers: Sequence[Any]) -> list[str]:
    """Return why each worker refuses the weights (empty if it accepts). Raises EngineError for an invalid answer."""
    reasons = [answer.get("reason") if isinstance(answer, dict) else None for answer in answers]
    if not reasons or not all(isinstance(reason, str) for reason in reasons):
        raise EngineError(f"expected an answer with the text `reason` from every vLLM worker, got {str(answers)[:200]}")
    return [str(reason) for reason in reasons]
