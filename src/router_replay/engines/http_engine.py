"""The protocol of engines over the few calls that a server behind a URL has.

Requests pass a gate, which is shut while the engine is paused and while weights
change: what would start then would have two versions.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence

from router_replay.engines import checks
from router_replay.engines.http import Http
from router_replay.engines.on_loop import LoopEngine
from router_replay.engines.types import Completion, InFlight, Request
from router_replay.errors import EngineError

ABORT_ROUNDS = 40  # an abort can overtake its request on the way to the server, so it is said again


class Flight:
    """A request on its way. `names` are what the server calls its samples; `version` is the policy it started under."""

    def __init__(self, request: Request) -> None:
        self.request = request
        # Random and of one length: SGLang aborts every request whose name begins with the one that it is given.
        self.names = [f"rr-{uuid.uuid4().hex}" for _ in range(request.sampling.n)]
        self.version = 0
        self.started = False
        self.stopped = False
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()


class HttpEngine(LoopEngine):
    """The protocol over a server. A subclass supplies the calls below "what a server does"."""

    def __init__(
        self,
        url: str,
        version: int,
        timeout: float,
        api_key: str | None,
        vocabulary: int | None,
        allow_zero_layers: bool = False,
    ) -> None:
        self.vocabulary = checks.vocabulary(vocabulary)
        self._timeout = checks.seconds(timeout, "timeout")
        self._api_key = api_key
        super().__init__(version, allow_zero_layers)
        self._flights: list[Flight] = []
        self._open = True  # requests start; shut while paused and while weights change
        self._held = False  # the server itself does not compute
        self._paused = False  # by the caller
        self._broken = ""
        try:
            self._wait(self._start(url))
        except BaseException:
            self._stop_loop()
            raise

    # -- what a server does ---------------------------------------------------------------------

    @abc.abstractmethod
    async def _connect(self) -> None:
        """Set `spec` and `capabilities` from what the server says, or raise with the reason."""

    @abc.abstractmethod
    async def _generate(self, flight: Flight) -> list[Completion]: ...

    @abc.abstractmethod
    async def _stop(self, flights: Sequence[Flight]) -> None:
        """Ask the server to end these; may be called again for those that are still there."""

    @abc.abstractmethod
    async def _hold(self) -> None: ...

    @abc.abstractmethod
    async def _go(self) -> None: ...

    @abc.abstractmethod
    async def _load(self, source: str, version: int, in_flight: InFlight) -> None:
        """Load weights into the held server; may set `_broken` when what it holds is not known any more."""

    # -- on the loop ----------------------------------------------------------------------------

    async def _start(self, url: str) -> None:
        self._exclusive = asyncio.Lock()
        self._gate = asyncio.Condition()
        self._http = Http(url, self._timeout, self.server, api_key=self._api_key)
        try:
            await self._connect()
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        await self._http.close()

    async def _fly(self, request: Request) -> list[Completion]:
        flight = Flight(request)
        self._flights.append(flight)
        try:
            async with self._gate:
                await self._gate.wait_for(lambda: self._open or flight.stopped)
            if self._broken:
                raise EngineError(self._broken)
            if flight.stopped:
                completions = Completion.nothing(request, self.spec)
            else:
                flight.version, flight.started = self.version, True
                completions = await self._generate(flight)
                self._capture_watch.check(completions, self.spec)
        except BaseException as error:
            raise self._fail(request, flight.done, error)  # noqa: B904  which has its cause
        else:
            flight.done.set_result(completions)
            return completions
        finally:
            self._flights.remove(flight)

    async def _abort(self, wanted: set[str] | None) -> list[Completion]:
        async with self._exclusive:  # an abort must not set a server going while weights are loaded into it
            chosen = [flight for flight in self._flights if wanted is None or flight.request.id in wanted]
            held = self._held and any(flight.started for flight in chosen)
            if held:  # a held server ends nothing
                await self._release()
            try:
                await self._bring_down(chosen)
            finally:
                if held:
                    await self._seize()
        landed = await asyncio.gather(*(flight.done for flight in chosen))
        return [completion for completions in landed for completion in completions]

    async def _bring_down(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.stopped = True
        async with self._gate:
            self._gate.notify_all()
        seconds = 0.05
        for _ in range(ABORT_ROUNDS):
            running = [flight for flight in flights if not flight.done.done()]
            if not running:
                return
            started = [flight for flight in running if flight.started]
            if started:
                await self._stop(started)
            await asyncio.wait([flight.done for flight in running], timeout=seconds)
            seconds = min(1.0, seconds * 1.5)
        left = [flight.request.id for flight in flights if not flight.done.done()]
        if left:
            raise EngineError(f"{self._http.url} was told to end {left[:8]} {ABORT_ROUNDS} times and did not")

    async def _pause(self, in_flight: InFlight) -> None:
        async with self._settled(in_flight):
            await self._seize()
            self._paused = True

    async def _resume(self) -> None:
        async with self._exclusive:
            await self._release()
            self._paused = False
            await self._reopen()

    async def _update(self, source: str, version: int, in_flight: InFlight) -> None:
        async with self._settled(in_flight):
            if self._broken:
                raise EngineError(self._broken)
            try:
                await self._seize()
                await self._load(source, version, in_flight)
                self.version = version
            finally:
                if not self._paused:
                    with contextlib.suppress(EngineError) if self._broken else contextlib.nullcontext():
                        await self._release()

    @contextlib.asynccontextmanager
    async def _settled(self, in_flight: InFlight) -> AsyncIterator[None]:
        """Nothing starts, nobody else pauses or loads, and what runs was ended, waited for, or kept as asked."""
        self._open = False
        try:
            if in_flight == "wait":
                await self._settle(in_flight)  # before the lock: it can take long, and an abort may end it
        except BaseException:
            async with self._exclusive:  # somebody else may be loading weights behind the shut gate
                await self._reopen()
            raise
        async with self._exclusive:
            self._open = False
            try:
                await self._settle(in_flight)
                yield
            finally:
                await self._reopen()

    async def _settle(self, in_flight: InFlight) -> None:
        """The requests that the server works on: ended, finished, or left to be held."""
        flights = [flight for flight in self._flights if flight.started]
        if not flights or in_flight == "keep":
            return
        if in_flight == "wait":
            if self._held:
                raise EngineError("a paused engine finishes nothing: resume it, or choose in_flight='abort' or 'keep'")
            await asyncio.wait([flight.done for flight in flights])
            return
        await self._release()
        await self._bring_down(flights)

    async def _seize(self) -> None:
        if not self._held:
            await self._hold()
            self._held = True

    async def _release(self) -> None:
        if self._held:
            await self._go()
            self._held = False

    async def _reopen(self) -> None:
        async with self._gate:
            self._open = not self._paused
            self._gate.notify_all()
