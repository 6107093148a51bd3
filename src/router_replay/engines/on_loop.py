"""What engines behind a connection share: one event loop in a thread of its own.

`submit` may then be awaited in any loop, and the blocking calls may come from any thread.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from router_replay.engines import checks
from router_replay.engines.base import Engine, WeightSource, check_in_flight
from router_replay.engines.capture_watch import CaptureWatch
from router_replay.engines.http import printable
from router_replay.engines.types import Completion, InFlight, Request
from router_replay.errors import EngineError, RouterReplayError

LONGEST_ERROR = 4000  # characters: its words may be a server's
T = TypeVar("T")


class LoopEngine(Engine):
    """The protocol's calls, handed over to coroutines of the same names on the engine's own loop."""

    server = "HTTP"
    """What stands behind the connection, in errors."""

    def __init__(self, version: int, allow_zero_layers: bool = False) -> None:
        self.version = checks.version(version)
        self._capture_watch = CaptureWatch(allow_zero_layers)
        self._closed = False
        self._tasks: dict[str, asyncio.Task[Any] | None] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"router-replay-{self.server}", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    async def _fly(self, request: Request) -> list[Completion]: ...

    @abc.abstractmethod
    async def _abort(self, wanted: set[str] | None) -> list[Completion]: ...

    @abc.abstractmethod
    async def _pause(self, in_flight: InFlight) -> None: ...

    @abc.abstractmethod
    async def _resume(self) -> None: ...

    @abc.abstractmethod
    async def _update(self, source: str, version: int, in_flight: InFlight) -> None: ...

    @abc.abstractmethod
    async def _close(self) -> None:
        """Let go of the connection; the loop ends afterwards."""

    # -- the protocol ---------------------------------------------------------------------------

    async def submit(self, request: Request) -> list[Completion]:
        self._refuse_closed()
        request = self._checked(request)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._alone(request), self._loop))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        names = checks.request_ids(request_ids)
        return self._wait(self._abort(None if names is None else set(names)))

    def pause(self, in_flight: InFlight = "keep") -> None:
        self._wait(self._pause(check_in_flight(in_flight)))

    def resume(self) -> None:
        self._wait(self._resume())

    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        self._wait(self._update(checks.folder(source), checks.version(version), check_in_flight(in_flight)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._stop_loop()

    # -- the loop -------------------------------------------------------------------------------

    async def _alone(self, request: Request) -> list[Completion]:
        """Two requests of one name could not be told apart, by an abort or by who reads their completions."""
        other = self._tasks.get(request.id)
        if other is not None and not other.cancelling():
            raise EngineError(f"{request.id}: a request of this id is in flight; give each an id of its own")
        task = self._tasks[request.id] = asyncio.current_task()
        try:
            return await self._fly(request)
        finally:
            if self._tasks.get(request.id) is task:
                del self._tasks[request.id]

    def _fail(self, request: Request, done: asyncio.Future[list[Completion]], error: BaseException) -> BaseException:
        """What the caller of a request is told that failed; `done` tells it to an abort that waits for the same.

        To an abort, a request whose caller has gone is nothing.
        """
        failure = error
        if isinstance(error, asyncio.CancelledError) and self._closed:
            failure = EngineError(f"{request.id}: the engine was closed before the answer came")
        elif not isinstance(error, RouterReplayError | asyncio.CancelledError):
            cause = error if str(error) else error.__cause__ or error  # vLLM has wrappers without a text
            failure = EngineError(f"{request.id}: {self.server} failed: {type(cause).__name__}: {cause}")
        failure = _fit_to_print(failure)
        if failure is not error:
            failure.__cause__ = error
        if isinstance(failure, asyncio.CancelledError) and not done.done():
            done.set_result([])
        elif not done.done():
            done.set_exception(failure)
            done.exception()  # looked at: a request that failed need not be awaited by anybody else
        return failure

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            self._refuse_closed()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=1.0).done:
                if self._is_dead():
                    future.cancel()
                    raise EngineError(f"{self.server} died before it answered; start the engine anew")
            return future.result()
        except RouterReplayError as error:
            shown = _fit_to_print(error)
            if shown is error:
                raise
            raise shown from error
        except concurrent.futures.CancelledError as error:
            raise EngineError("the engine was closed meanwhile") from error
        except Exception as error:
            raise _fit_to_print(EngineError(f"{self.server} failed: {type(error).__name__}: {error}")) from error

    def _is_dead(self) -> bool:
        """Whether what stands behind the connection is known to be gone, so that waiting is in vain."""
        return False

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("this engine was closed")

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


def _fit_to_print(error: BaseException) -> BaseException:
    """The error itself, or one that does not fill the screen or send commands to a terminal."""
    if not isinstance(error, RouterReplayError):
        return error
    text = printable(str(error))
    if len(text) > LONGEST_ERROR:
        text = f"{text[:LONGEST_ERROR]}... ({len(text)} characters)"
    return error if text == str(error) else EngineError(text)
