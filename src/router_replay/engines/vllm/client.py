"""What vLLM in process and vLLM over HTTP share: flights, aborts, pauses, and weight swaps with the right versions.

A `Transport` supplies the few calls in which they differ.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from router_replay.engines import checks
from router_replay.engines.base import SharedTensors, WeightSource, check_in_flight
from router_replay.engines.on_loop import LoopEngine
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.engines.vllm.samples import Flight, Sample, completion_of, progress_of
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

ABORT_ROUNDS = 400  # of 50 ms: an abort can overtake its request on the way to the engine, so it is said again


class Transport(abc.ABC):
    """How one reaches a vLLM engine. Called on the client's event loop only."""

    spec: RouterSpec
    capabilities: Capabilities
    logprobs_mode: str = "processed_logprobs"
    vocabulary: int | None = None

    @abc.abstractmethod
    async def generate(self, flight: Flight) -> list[Sample]: ...

    @abc.abstractmethod
    async def abort(self, names: Sequence[str]) -> None: ...

    @abc.abstractmethod
    async def pause(self, mode: InFlight) -> None: ...

    @abc.abstractmethod
    async def resume(self) -> None: ...

    async def call(self, method: str, **arguments: str) -> dict[str, Any]:
        """A method of the plugin in every worker; the first worker's answer."""
        [first, *_] = await self.call_all(method, **arguments)
        return first

    @abc.abstractmethod
    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        """The same; the answers of all workers."""

    @abc.abstractmethod
    async def reset_prefix_cache(self) -> bool: ...

    def dead(self) -> bool:
        """Whether calls may wait for an answer that never comes."""
        return False

    @abc.abstractmethod
    async def close(self) -> None: ...


class VllmClient(LoopEngine):
    """The protocol over a Transport. `start` is run on the client's loop and gives the transport, or raises."""

    server = "vLLM"

    def __init__(
        self, start: Coroutine[Any, Any, Transport], version: int = 0, *, allow_zero_layers: bool = False
    ) -> None:
        try:
            super().__init__(version, allow_zero_layers)
        except BaseException:
            start.close()
            raise
        self._flights: dict[str, Flight] = {}
        self._paused = False
        self._broken = ""
        self._updates = 0
        self._open = asyncio.Event()  # closed while weights change: what starts then would have two versions
        self._open.set()
        self._exclusive = asyncio.Lock()
        try:
            self._transport = self._wait(start)
        except BaseException:
            self._stop_loop()
            raise
        self.spec = self._transport.spec
        self.capabilities = self._transport.capabilities
        self.vocabulary = self._transport.vocabulary

    # -- the protocol ---------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        """Load a folder, a safetensors file or memory that `vllm.weights.share` filled, in place.

        Weights that do not fit are refused before a request is touched.
        """
        info = source.info() if isinstance(source, SharedTensors) else {"path": checks.folder(source)}
        self._wait(self._update(json.dumps(info), checks.version(version), check_in_flight(in_flight)))

    def report(self) -> dict[str, Any]:
        """What the plugin in the worker says of itself: rules of the routers, rows forced so far."""
        return self._wait(self._transport.call("router_replay_report"))

    # -- on the loop ----------------------------------------------------------------------------

    async def _fly(self, request: Request) -> list[Completion]:
        flight = Flight(request)
        self._flights[flight.name] = flight
        try:
            await self._passed_gate(flight)
            flight.start(self.version, f"router-replay-version-{self.version}-{self._updates}")
            aborted = [Sample(index, (), (), None, "abort") for index in range(request.sampling.n)]
            samples = aborted if flight.stopped.is_set() else await self._transport.generate(flight)
            self._refuse_broken()  # also where it broke meanwhile: nobody knows what these were sampled from
            completions = self._completions(flight, samples)
            self._capture_watch.check(completions, self.spec)
        except BaseException as error:
            raise self._fail(request, flight.done, error)  # noqa: B904  which has its cause
        else:
            if not flight.done.done():  # a close ends it early
                flight.done.set_result(completions)
            return completions
        finally:
            del self._flights[flight.name]

    async def _passed_gate(self, flight: Flight) -> None:
        """Wait while weights change, and no longer than the request is wanted."""
        while not self._open.is_set() and not flight.stopped.is_set():
            waits = [asyncio.create_task(event.wait()) for event in (self._open, flight.stopped)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        self._refuse_broken()

    def _completions(self, flight: Flight, samples: Sequence[Sample]) -> list[Completion]:
        request = flight.request
        samples = sorted(samples, key=lambda sample: sample.index)
        if [sample.index for sample in samples] != list(range(request.sampling.n)):
            raise EngineError(f"{request.id}: asked for {request.sampling.n} samples, got {len(samples)}")
        for sample in samples:
            if self.capabilities.routes and sample.rows is None and sample.token_ids and not flight.stopped.is_set():
                raise EngineError(f"{request.id}: vLLM returned {len(sample.token_ids)} tokens without their experts")
        return [completion_of(sample, flight, self.spec, self.vocabulary) for sample in samples]

    async def _abort(self, wanted: set[str] | None) -> list[Completion]:
        chosen = [flight for flight in self._flights.values() if wanted is None or flight.request.id in wanted]
        await self._bring_down(chosen)
        landed = await asyncio.gather(*(flight.done for flight in chosen))
        return [completion for completions in landed for completion in completions]

    async def _bring_down(self, flights: Sequence[Flight]) -> None:
        """Abort until all are back: a request may still be on its way to the engine when the first abort arrives."""
        waiting = list(flights)
        for flight in waiting:
            flight.stopped.set()
        for _ in range(ABORT_ROUNDS):
            if not waiting:
                return
            await self._transport.abort([flight.name for flight in waiting])
            await asyncio.wait([flight.done for flight in waiting], timeout=0.05)
            waiting = [flight for flight in waiting if not flight.done.done()]
        if waiting:
            names = [flight.request.id for flight in waiting[:8]]
            raise EngineError(f"vLLM was told to end {names} {ABORT_ROUNDS} times and did not: is the abort for it?")

    async def _pause(self, in_flight: InFlight) -> None:
        async with self._exclusive:
            await self._settle(in_flight)
            self._paused = True

    async def _settle(self, in_flight: InFlight) -> None:
        """Stop the engine with its requests aborted, finished, or frozen."""
        flights = [flight for flight in self._flights.values() if flight.started]
        if in_flight == "wait" and flights:
            if self._paused:
                raise EngineError("a paused engine finishes nothing: resume it, or choose in_flight='abort' or 'keep'")
            await asyncio.wait([flight.done for flight in flights])
        elif in_flight == "abort":
            await self._bring_down(flights)
        await self._transport.pause("keep")

    async def _resume(self) -> None:
        async with self._exclusive:
            await self._transport.resume()
            self._paused = False

    async def _update(self, source: str, version: int, in_flight: InFlight) -> None:
        self._refuse_broken()
        for found in _reasons(await self._transport.call_all("router_replay_find_weights", source=source)):
            if found:
                raise EngineError(found)
        async with self._exclusive:
            self._refuse_broken()
            self._open.clear()
            try:
                await self._settle(in_flight)
                try:
                    await self._swap(source, version, in_flight)
                finally:
                    if not self._paused:  # also after a failure: what was kept would hang, and others share a server
                        await self._transport.resume()
            finally:
                self._open.set()

    async def _swap(self, source: str, version: int, in_flight: InFlight) -> None:
        try:
            answers = await self._transport.call_all("router_replay_update_weights", source=source)
            reasons = _reasons(answers)
        except Exception as error:
            await self._break(
                f"loading the weights of {source[:200]} failed, what the engine holds is unknown: {error}"
            )
        refused = [reason for reason in reasons if reason]
        if len(refused) == len(reasons):  # they were there a moment ago; nothing was touched
            raise EngineError(refused[0])
        if refused:
            await self._break(f"some workers loaded {source[:200]} and some did not: {refused[0]}")
        try:
            computed = progress_of(answers[0].get("progress", {}))
            kept = [flight for flight in self._flights.values() if flight.started]
            for flight in kept:
                flight.swap(computed.get(flight.name, {}), version)
            reset = await self._transport.reset_prefix_cache()
        except Exception as error:  # the new weights are in, and would go under the old version
            await self._break(f"the weights of {source[:200]} were loaded, but vLLM did not follow: {error}")
        # Frozen requests hold blocks, and vLLM then resets nothing; the salt of each update keeps the old ones apart.
        if not reset and not (in_flight == "keep" and kept):
            await self._break(
                "vLLM did not reset its prefix cache after the weight update: KV of the old weights is left"
            )
        self.version = version
        self._updates += 1

    async def _break(self, reason: str) -> NoReturn:
        """The engine cannot be trusted any more: requests in flight end with this error, as does all that follows."""
        self._broken = f"{reason}; start the engine anew"
        with contextlib.suppress(Exception):  # a dead engine ends them by itself
            await self._bring_down([flight for flight in self._flights.values() if flight.started])
        raise EngineError(self._broken)

    async def _close(self) -> None:
        for flight in list(self._flights.values()):
            flight.done.cancel()
        await self._transport.close()

    # -- helpers --------------------------------------------------------------------------------

    def _is_dead(self) -> bool:
        return hasattr(self, "_transport") and self._transport.dead()

    def _refuse_broken(self) -> None:
        if self._broken:
            raise EngineError(self._broken)

    def _checked(self, request: Request) -> Request:
        request = super()._checked(request)
        if request.sampling.temperature not in (0.0, 1.0) and not self._transport.logprobs_mode.startswith("processed"):
            raise EngineError(
                f"{request.id}: temperature {request.sampling.temperature}, but this server's log-probs are those of "
                "temperature 1: start it with --logprobs-mode processed_logprobs (router-replay serve does)"
            )
        return request


def _reasons(answers: Sequence[Any]) -> list[str]:
    """Why each worker refuses weights, empty where it does not; EngineError where they do not say it."""
    reasons = [answer.get("reason") if isinstance(answer, dict) else None for answer in answers]
    if not reasons or not all(isinstance(reason, str) for reason in reasons):
        raise EngineError(f"expected an answer with a reason from every vLLM worker, got {str(answers)[:200]}")
    return [str(reason) for reason in reasons]
