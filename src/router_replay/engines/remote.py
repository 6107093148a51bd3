"""Implements the engine protocol (submit, abort, pause, resume, update) on top of a small Backend.

A Backend provides what a remote engine can do: generate, stop, hold, go, load. Everything else is implemented here,
once for vLLM, SGLang and Dynamo. It runs on an event loop in a separate thread, so `submit` may be awaited in any loop
and the blocking calls may come from any thread.

Pauses, updates and resumes run one after the other, in the order of their calls. Each settles the requests that were
submitted before it: they are aborted, waited for, or kept. A request that is submitted later starts when the engine
resumes, so no request starts under two versions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from router_replay.engines import checks
from router_replay.engines.backend import Backend, BrokenError, Flight
from router_replay.engines.base import PAUSED_FINISHES_NOTHING, Engine, WeightSource, check_in_flight
from router_replay.engines.capture_watch import CaptureWatch
from router_replay.engines.http import printable
from router_replay.engines.types import Completion, InFlight, Request
from router_replay.errors import EngineError, RouterReplayError

ABORT_ROUNDS = 40  # an abort can reach the engine before its request does, so it is sent again
LONGEST_ERROR = 4000  # characters; the text may come from a server
T = TypeVar("T")


class RemoteEngine(Engine):
    """Implements the engine protocol over a Backend, which `connect` creates on the engine's own event loop."""

    server = "HTTP"
    """The kind of server, as named in error messages."""

    def __init__(
        self,
        connect: Callable[[], Coroutine[Any, Any, Backend]],
        version: int = 0,
        *,
        allow_zero_layers: bool = False,
    ) -> None:
        self.version = checks.version(version)
        self._capture_watch = CaptureWatch(allow_zero_layers)
        self._closed = False
        self._tasks: dict[str, asyncio.Task[Any] | None] = {}
        self._flights: list[Flight] = []
        self._waiting: Collection[Flight] = ()  # may start while the gate is closed, because a call waits for them
        self._pending = 0  # number of unfinished pauses and updates
        self._paused = False  # by the caller
        self._held = False  # the engine itself has stopped computing
        self._broken = ""
        self._backend: Backend | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"router-replay-{self.server}", daemon=True)
        self._thread.start()
        try:
            self._backend = self._wait(self._connect(connect))
        except BaseException:
            self._stop_loop()
            raise
        self.spec, self.capabilities = self._backend.spec, self._backend.capabilities
        self.vocabulary = self._backend.vocabulary

    # -- the protocol ---------------------------------------------------------------------------

    async def submit(self, request: Request) -> list[Completion]:
        """Generate all samples of one `request`. May be awaited in any event loop."""
        self._refuse_closed()
        request = self._checked(request)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._alone(request), self._loop))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort the requests `request_ids` (all if None) on the server, and return their output so far."""
        names = checks.request_ids(request_ids)
        return self._wait(self._abort(None if names is None else set(names)))

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Hold the server after settling running requests by `in_flight`; later requests wait for `resume`."""
        self._wait(self._pause(check_in_flight(in_flight)))

    def resume(self) -> None:
        """Release the server: kept requests go on, and waiting requests start."""
        self._wait(self._resume())

    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        """Load the weights of `source` as `version`, after settling running requests by `in_flight`.

        With "abort" it may return before the answers of the aborted requests are read. Later requests start after that.
        Raises EngineError if the update fails. If it is then unknown which weights the engine holds, every later
        request and update raises the same error.
        """
        source = self._source(source)
        self._wait(self._update(source, checks.version(version), check_in_flight(in_flight)))

    def ping(self) -> None:
        """Raise EngineError if the server does not answer, or if it is unknown which weights it holds."""
        self._wait(self._ping())

    def close(self) -> None:
        """Disconnect, or stop an engine of this process. Requests in flight fail with EngineError."""
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._stop_loop()

    def _source(self, source: WeightSource) -> WeightSource:
        """Return the weights in the form that the backend takes. Raises EngineError if it cannot take them."""
        return checks.folder(source)

    def _checked(self, request: Request) -> Request:
        request = super()._checked(request)
        self._connected.refuse(request)
        return request

    async def _ping(self) -> None:
        self._refuse_broken()
        if self._connected.dead():
            raise EngineError(f"{self.server} died: create a new engine")
        await self._connected.ping()

    # -- on the loop: requests ------------------------------------------------------------------

    async def _connect(self, connect: Callable[[], Coroutine[Any, Any, Backend]]) -> Backend:
        self._turn = asyncio.Lock()  # pauses, updates and resumes run one after the other
        self._exclusive = asyncio.Lock()  # only one of them holds, releases or loads the engine
        self._gate = asyncio.Condition()
        return await connect()

    @property
    def _connected(self) -> Backend:
        if self._backend is None:
            raise EngineError("this engine is not connected to a server: create a new engine")
        return self._backend

    @property
    def _open(self) -> bool:
        """Return whether requests may start."""
        return not self._paused and not self._pending

    async def _alone(self, request: Request) -> list[Completion]:
        """Run a request whose id must be unique among those in flight.

        Two requests with one id could not be told apart, either by an abort or by the reader of the completions.
        """
        other = self._tasks.get(request.id)
        if other is not None and not other.cancelling():
            raise EngineError(
                f"{request.id}: another request with this id is in flight: give every request a unique id"
            )
        task = self._tasks[request.id] = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)
        try:
            return await self._fly(Flight(request))
        finally:
            if self._tasks.get(request.id) is task:
                del self._tasks[request.id]

    async def _fly(self, flight: Flight) -> list[Completion]:
        self._flights.append(flight)
        try:
            completions = await self._completions(flight)
        except BaseException as error:
            raise self._fail(flight, error)  # noqa: B904  the error has its cause
        else:
            if not flight.done.done():  # `close` may have ended it early
                flight.done.set_result(completions)
            return completions
        finally:
            self._flights.remove(flight)

    async def _completions(self, flight: Flight) -> list[Completion]:
        async with self._gate:
            await self._gate.wait_for(lambda: self._open or flight.stopped or flight in self._waiting)
        self._refuse_broken()
        if flight.stopped:
            return Completion.nothing(flight.request, self.spec)
        flight.start(self.version)
        flight.work = asyncio.ensure_future(self._connected.generate(flight))
        try:
            completions = await flight.work
        finally:
            flight.work.cancel()
        if not flight.ended:
            self._refuse_broken()  # the engine broke meanwhile: it is unknown which weights sampled these
        if len(completions) != flight.request.sampling.n:
            asked = flight.request.sampling.n
            raise EngineError(
                f"{flight.request.id}: {self.server} was asked for {asked} samples, got {len(completions)}"
            )
        self._capture_watch.check(completions, self.spec)
        return completions

    def _fail(self, flight: Flight, error: BaseException) -> BaseException:
        """Return the error for the caller of a failed request, and set it on `done` for an abort that waits for it.

        An abort gets nothing for a request whose caller has gone.
        """
        request, failure = flight.request, error
        if isinstance(error, asyncio.CancelledError) and self._closed:
            failure = EngineError(f"{request.id}: the engine was closed before it answered this request")
        elif isinstance(error, asyncio.CancelledError) and self._broken:
            failure = EngineError(self._broken)
        elif not isinstance(error, RouterReplayError | asyncio.CancelledError):
            cause = error if str(error) else error.__cause__ or error  # vLLM has wrapper exceptions without a message
            failure = EngineError(f"{request.id}: {self.server} failed: {type(cause).__name__}: {cause}")
        failure = _fit_to_print(failure)
        if failure is not error:
            failure.__cause__ = error
        if isinstance(failure, asyncio.CancelledError) and not flight.done.done():
            flight.done.set_result([])
        elif not flight.done.done():
            flight.done.set_exception(failure)
            flight.done.exception()  # mark it as retrieved, as nobody else needs to await a failed request
        return failure

    # -- on the loop: aborts, pauses, updates ---------------------------------------------------

    async def _abort(self, wanted: set[str] | None) -> list[Completion]:
        chosen = [flight for flight in self._flights if wanted is None or flight.request.id in wanted]
        await self._end(chosen)
        landed = await asyncio.gather(*(flight.done for flight in chosen))
        return [completion for completions in landed for completion in completions]

    async def _end(self, flights: Sequence[Flight]) -> None:
        """Abort these requests.

        Requests that have not started end at once; the others can only be aborted while no weights are being loaded.
        """
        await self._mark_stopped(flights)
        if any(flight.started for flight in flights):
            async with self._exclusive:
                awake = self._held and not self._connected.ends_while_held
                if awake:
                    await self._release()
                try:
                    await self._bring_down(flights)
                finally:
                    if awake:
                        await self._seize()

    async def _mark_stopped(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.stopped = True
        await self._notify()

    async def _bring_down(self, flights: Sequence[Flight]) -> None:
        seconds = 0.05
        for _ in range(ABORT_ROUNDS):
            running = [flight for flight in flights if not flight.done.done()]
            if not running:
                return
            started = [flight for flight in running if flight.started]
            if started:
                await self._connected.stop(started)
            await asyncio.wait([flight.done for flight in running], timeout=seconds)
            seconds = min(1.0, seconds * 1.5)
        left = [flight.request.id for flight in flights if not flight.done.done()]
        if left:
            raise EngineError(
                f"{self.server} was asked {ABORT_ROUNDS} times to abort {left[:8]}, and these requests still run: "
                "restart the server"
            )

    async def _pause(self, in_flight: InFlight) -> None:
        async with self._settled(in_flight):
            await self._seize()
            self._paused = True

    async def _resume(self) -> None:
        async with self._turn, self._exclusive:
            await self._release()
            self._paused = False
        await self._notify()

    async def _update(self, source: WeightSource, version: int, in_flight: InFlight) -> None:
        self._refuse_broken()
        await self._connected.find(source)
        loaded, told = asyncio.get_running_loop().create_future(), asyncio.Event()
        caller = asyncio.current_task()
        assert caller is not None
        caller.add_done_callback(lambda _: told.set())
        change = asyncio.ensure_future(self._change(source, version, in_flight, loaded, told))
        change.add_done_callback(_retrieve)
        try:
            await asyncio.wait([change, loaded], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            change.cancel()
            raise
        if change.done():
            change.result()

    async def _change(
        self,
        source: WeightSource,
        version: int,
        in_flight: InFlight,
        loaded: asyncio.Future[None],
        told: asyncio.Event,
    ) -> None:
        """Settle earlier requests, load the weights, and resume.

        If the engine can, requests are aborted after the load: it is held from before the load until they have ended,
        so it computed all of their rows with the old weights. The caller of the update does not wait for their answers:
        `loaded` lets it return, and they are read only when `told` is set, after it has returned, because reading
        hundreds of answers keeps this loop busy.
        """
        later = in_flight == "abort" and self._connected.aborts_after_load
        async with self._settled("keep" if later else in_flight) as before:
            self._refuse_broken()
            ending = before if later else []
            for flight in ending:
                flight.ended = True
            await self._mark_stopped(ending)
            try:
                await self._seize()
                try:
                    await self._load(source, version)
                    if ending:
                        loaded.set_result(None)
                        await told.wait()
                finally:
                    await self._bring_down(ending)
            except EngineError as error:
                if loaded.done():  # the caller has gone on, so the next calls raise it
                    self._broken = self._broken or str(error)
                for flight in ending:  # those that are left go on, and with new or unknown weights if it is broken
                    flight.ended = False
                raise
            finally:
                if not self._paused:  # also after a failure: kept requests would hang, and others use the server
                    await self._release_after(loaded)

    async def _release_after(self, loaded: asyncio.Future[None]) -> None:
        """Release the engine after a weight change. A failure is raised, or kept for the next calls if it is `loaded`.

        An engine that is broken already has its reason.
        """
        try:
            await self._release()
        except Exception as error:
            if not self._broken:
                self._broken = str(error) if loaded.done() else ""
                raise

    async def _load(self, source: WeightSource, version: int) -> None:
        running = self._kept()
        kept = [flight for flight in running if not flight.ended]
        try:
            progress = await self._connected.load(source, version, running)
            for flight in kept:
                flight.swap(progress.get(flight.name, {}), version)
        except BrokenError as error:
            self._broken = str(error)
            for flight in kept:
                if flight.work is not None:
                    flight.work.cancel()
            raise EngineError(self._broken) from error
        self.version = version

    @contextlib.asynccontextmanager
    async def _settled(self, in_flight: InFlight) -> AsyncIterator[Sequence[Flight]]:
        """Settle earlier requests (abort, wait or keep, as asked), and block starts, pauses and loads in the block.

        The block gets the earlier requests that have not ended.
        """
        before = list(self._flights)
        self._pending += 1
        try:
            async with self._turn:
                await self._settle([flight for flight in before if not flight.done.done()], in_flight)
                async with self._exclusive:
                    yield [flight for flight in before if not flight.done.done()]
        finally:
            self._pending -= 1
            await self._notify()

    async def _settle(self, flights: Sequence[Flight], in_flight: InFlight) -> None:
        if in_flight == "abort":
            await self._end(flights)
            await asyncio.wait([flight.done for flight in flights]) if flights else None
        elif in_flight == "wait" and flights:
            if self._paused:
                raise EngineError(PAUSED_FINISHES_NOTHING)
            self._waiting = flights
            await self._notify()
            try:
                await asyncio.wait([flight.done for flight in flights])
            finally:
                self._waiting = ()

    def _kept(self) -> list[Flight]:
        return [flight for flight in self._flights if flight.started and not flight.done.done()]

    async def _seize(self) -> None:
        if not self._held:
            await self._connected.hold(self._kept())
            self._held = True

    async def _release(self) -> None:
        if self._held:
            await self._connected.go()
            self._held = False

    async def _notify(self) -> None:
        async with self._gate:
            self._gate.notify_all()

    async def _close(self) -> None:
        for flight in list(self._flights):
            flight.done.cancel()
        await self._connected.close()

    # -- the loop -------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            self._refuse_closed()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=1.0).done:
                if self._backend is not None and self._backend.dead():
                    future.cancel()
                    raise EngineError(f"{self.server} died before it answered: create a new engine")
            return future.result()
        except RouterReplayError as error:
            shown = _fit_to_print(error)
            if shown is error:
                raise
            raise shown from error
        except concurrent.futures.CancelledError as error:
            raise EngineError("the engine was closed during this call") from error
        except Exception as error:
            raise _fit_to_print(EngineError(f"{self.server} failed: {type(error).__name__}: {error}")) from error

    def _refuse_broken(self) -> None:
        if self._broken:
            raise EngineError(self._broken)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("this engine was closed: create a new one")

    def _run_loop(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _stop_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark a request's error as seen. If its caller has gone, asyncio would print it with its traceback."""
    if not task.cancelled():
        task.exception()


def _fit_to_print(error: BaseException) -> BaseException:
    """Return the error, or a shortened copy without control characters if it is not safe to print."""
    if not isinstance(error, RouterReplayError):
        return error
    text = printable(str(error))
    if len(text) > LONGEST_ERROR:
        text = f"{text[:LONGEST_ERROR]}... ({len(text)} characters)"
    return error if text == str(error) else EngineError(text)
