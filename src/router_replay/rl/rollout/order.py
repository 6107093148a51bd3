"""Record in which order things happen in an asynchronous run, or let them happen in a recorded order.

    await order.turn("3.0")                                    # episode 0 of group 3 wants to do something
    order.did("submit", request="3.0.0.0", version=1)          # and did it

Episodes, the trainer and the engine run at the same time. Everything that decides the weights is a step of one of them,
an event: a request is submitted, an answer is taken, an episode ends, the trainer takes groups, the weights change, the
engine runs a pass. `Order` lets them happen as they come. `Recorder` also writes them down. `Follower` lets each happen
when it is the next event of a file: then requests, batches and versions are the same, and so is every bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from router_replay.engines.pass_order import PassOrder
from router_replay.errors import TrainError
from router_replay.rl.state.schedule import Event, ScheduleWriter

TRAINER, ENGINE = "trainer", "engine"
STALL_SECONDS = 60.0
"""A run that follows a schedule ends with an error if the trainer waits so long and nothing happens."""


class Order(PassOrder):
    """Let everything happen as it comes. `notes` says whether somebody reads what `did` is told."""

    notes = False

    def attach(self, loop: asyncio.AbstractEventLoop, wake_engine: Callable[[], None]) -> None:
        """Take the event loop of the episodes, and a function that makes the engine look again."""

    async def turn(self, who: str) -> None:
        """Wait until `who` may do its next step: an episode such as "3.0", or the trainer."""

    def did(self, do: str, **facts: Any) -> None:
        """Take note of an event. Steps that it caused at once, such as admissions, are part of its `facts`."""

    def fail(self, error: BaseException) -> None:
        """Let the trainer know of an error while it waits for its turn."""

    def end(self) -> None:
        """Stop recording or following: the run stops its rollouts."""


class Recorder(Order):
    """Write every event to a file."""

    notes = True

    def __init__(self, writer: ScheduleWriter) -> None:
        self._writer, self._lock = writer, threading.Lock()

    def did(self, do: str, **facts: Any) -> None:
        """Write the event."""
        with self._lock:
            self._writer.add({"do": do, **facts}, flush=do == "version")

    def end(self) -> None:
        """Close the file."""
        with self._lock:
            self._writer.close()

    def passed(self, joined: Sequence[str], batch: Sequence[str]) -> None:
        """Write the pass."""
        self.did("pass", join=list(joined), batch=list(batch))

    def aborts(self, requests: Sequence[str]) -> None:
        """Write the abort."""
        self.did("abort", requests=list(requests))

    def swaps(self, version: int) -> None:
        """Write the change of the weights."""
        self.did("weights", version=version)


class Follower(Recorder):
    """Let events happen in the order of `events`, which are those of the file `place`, and write them again.

    Raises TrainError, in the trainer's thread, if something else happens than the next event.
    """

    decides = True

    def __init__(self, writer: ScheduleWriter, events: Sequence[Event], place: str) -> None:
        super().__init__(writer)
        self._events, self._place, self._at = events, place, 0
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._error: BaseException | None = None
        self._ended = False
        self._moved_at = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_engine: Callable[[], None] = lambda: None

    def attach(self, loop: asyncio.AbstractEventLoop, wake_engine: Callable[[], None]) -> None:
        """Take the event loop of the episodes, and a function that makes the engine look again."""
        self._loop, self._wake_engine = loop, wake_engine
        wake_engine()

    async def turn(self, who: str) -> None:
        """Wait until the next event is one of `who`."""
        while True:
            with self._lock:
                if self._error is not None and who == TRAINER:
                    raise self._error
                if self._next() is None and who == TRAINER:
                    raise TrainError(
                        f"{self._place} ends after event {len(self._events) - 1}, and the run goes on: the recorded "
                        "run ended there; set fewer steps"
                    )
                if self._error is None and _owner(self._next()) == who:
                    return
                waiting = self._waiting[who] = asyncio.get_running_loop().create_future()
            if who != TRAINER:
                await waiting
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting, STALL_SECONDS)
            self._refuse_stall()

    def did(self, do: str, **facts: Any) -> None:
        """Go on to the next event if this was the one that is due. Raises TrainError if it was not."""
        event = {"do": do, **facts}
        with self._lock:
            if self._ended:
                return
            due = self._next()
            if self._error is None and event != due:
                self._error = TrainError(
                    f"the run departs from {self._place} at event {self._at}: expected {due}, and {event} happened"
                )
            if self._error is not None:
                self._wake(TRAINER)
                raise self._error
            self._writer.add(event, flush=do == "version")
            self._at, self._moved_at = self._at + 1, time.monotonic()
            owner = _owner(self._next())
            if owner != ENGINE:
                self._wake(owner)
        if owner == ENGINE:
            self._wake_engine()  # not under the lock: the engine asks `joining` under a lock of its own

    def fail(self, error: BaseException) -> None:
        """Let the trainer raise `error` if it waits for its turn."""
        with self._lock:
            self._error = self._error or error
            self._wake(TRAINER)

    def end(self) -> None:
        """Let nothing happen any more."""
        with self._lock:
            self._ended = True
            self._writer.close()

    def joining(self) -> Sequence[str] | None:
        """Return the requests that join in the next pass; None if the next event is no pass."""
        with self._lock:
            due = self._next()
            if self._ended or self._error is not None or due is None or due["do"] != "pass":
                return None
            return list(due.get("join", ()))

    def passed(self, joined: Sequence[str], batch: Sequence[str]) -> None:
        """Compare the pass; the trainer gets an error, because the engine's thread must not die of it."""
        with contextlib.suppress(TrainError):
            super().passed(joined, batch)

    def aborts(self, requests: Sequence[str]) -> None:
        """Compare the abort."""
        with contextlib.suppress(TrainError):
            super().aborts(requests)

    def swaps(self, version: int) -> None:
        """Compare the change of the weights."""
        with contextlib.suppress(TrainError):
            super().swaps(version)

    def _next(self) -> Event | None:
        return self._events[self._at] if self._at < len(self._events) else None

    def _wake(self, who: str) -> None:
        waiting = self._waiting.pop(who, None)
        if waiting is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(_set, waiting)

    def _refuse_stall(self) -> None:
        with self._lock:
            if self._error is None and time.monotonic() - self._moved_at >= STALL_SECONDS:
                raise TrainError(
                    f"the run departs from {self._place} at event {self._at}: {self._next()} is due, and nothing has "
                    f"happened for {STALL_SECONDS:.0f} seconds"
                )


def _owner(event: Event | None) -> str:
    """Return who does this event: an episode, the trainer or the engine."""
    if event is None:
        return ""
    if event["do"] == "pass":
        return ENGINE
    name = str(event.get("request") or event.get("episode") or "")
    return ".".join(name.split(".")[:2]) or TRAINER


def _set(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
