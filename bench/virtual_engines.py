"""Engines and an event loop that only take virtual time: a second of sleep costs no second, work costs what it costs.

The loop jumps to its next timer when nothing is ready and no thread outside works. An engine has slots that sample one
token per tick each; a request beyond them waits. Lengths belong to the episode, so an answer that is resumed ends where
it would have ended.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import heapq
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import numpy as np

from router_replay import RouterSpec, Routes
from router_replay.engines import EnginePool
from router_replay.engines.base import Engine
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.runs import Runs

SPEC = RouterSpec(num_experts=128, top_k=8, layers=tuple(range(4)))
LONGEST, PROMPT = 400, 3
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Count the time that is slept. `outside` is the number of threads whose work the loop must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.outside = 0.0, 0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    async def asleep(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` for a thread that counts as outside and waits for it: meanwhile time may go on."""
        self.outside -= 1
        try:
            return await work
        finally:
            self.outside += 1

    def _run_once(self) -> None:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(timers)._scheduled = False
        if timers and not self._ready and not self.outside:  # type: ignore[attr-defined]
            self.now = max(self.now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


class AtOnce(concurrent.futures.Executor):
    """Run what is submitted at once, in the same thread: these environments do not block."""

    def submit(self, fn: Callable[..., T], /, *arguments: Any, **named: Any) -> concurrent.futures.Future[T]:
        """Call `fn` and return its result in a future."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_result(fn(*arguments, **named))
        return future


@dataclasses.dataclass(eq=False)
class Flight:
    """Hold one sample in progress."""

    request: Request
    index: int
    length: int
    future: asyncio.Future[Completion]
    started: float = -1.0
    timer: asyncio.TimerHandle | None = None


class TimedEngine(Engine):
    """Answer after the time that the answer's tokens take. At most `slots` samples run at the same time.

    `lengths` are those of the episodes, by their numbers; an episode is group * `group` + member.
    """

    spec, vocabulary, version = SPEC, 1000, 0
    capabilities = Capabilities(routes=True, forced_routes=True, start=True, versions=True)
    rows = np.tile(np.arange(8, dtype=np.uint8), (LONGEST + 8, len(SPEC.layers), 1))

    def __init__(self, slots: int, tick: float, lengths: np.ndarray, group: int) -> None:
        self.loop: VirtualLoop | None = None
        self._slots, self._tick, self._lengths, self._group = slots, tick, lengths, group
        self._flights: dict[str, list[Flight]] = {}
        self._waiting: collections.deque[Flight] = collections.deque()
        self._running, self._changed = 0, 0.0
        self.busy_seconds = self.slot_seconds = 0.0  # with a sample in progress; summed over samples

    async def submit(self, request: Request) -> list[Completion]:
        """Wait for slots, then for the tokens; an abort returns those that there was time for."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        flights = [
            Flight(request, index, self._length(request, index), loop.create_future())
            for index in range(request.sampling.n)
        ]
        self._flights[request.id] = flights
        self._waiting.extend(flights)
        self._start()
        try:
            return [await flight.future for flight in flights]
        finally:
            del self._flights[request.id]

    def _length(self, request: Request, index: int) -> int:
        """Return how many tokens are left of this answer."""
        numbers = request.id.split(".")
        if len(numbers) < 4:  # of the synchronous loop
            return int(self._lengths[((request.sampling.seed or 0) + index) % len(self._lengths)])
        episode = int(numbers[0]) * self._group + int(numbers[1])
        return max(1, int(self._lengths[episode % len(self._lengths)]) - (len(request.token_ids) - PROMPT))

    def _start(self) -> None:
        assert self.loop is not None
        while self._waiting and self._running < self._slots:
            flight = self._waiting.popleft()
            if flight.future.done():
                continue
            self._count(1)
            flight.started = self.loop.now
            flight.timer = self.loop.call_later(flight.length * self._tick, self._land, flight, "length")

    def _land(self, flight: Flight, reason: str) -> None:
        assert self.loop is not None
        tokens = flight.length if reason == "length" else 0
        if flight.timer is not None:
            flight.timer.cancel()
            self._count(-1)
            if reason == "abort":
                tokens = min(flight.length, int((self.loop.now - flight.started) / self._tick))
        if flight.future.cancelled():
            return
        flight.future.set_result(self._answer(flight, tokens, reason if tokens < flight.length else "length"))
        self._start()

    def _count(self, change: int) -> None:
        self.figures()
        self._running += change

    def figures(self) -> tuple[float, float]:
        """Return the seconds with a sample in progress, and the seconds of all slots."""
        now = 0.0 if self.loop is None else self.loop.now
        passed, self._changed = now - self._changed, now
        self.busy_seconds += passed if self._running else 0.0
        self.slot_seconds += passed * self._running
        return self.busy_seconds, self.slot_seconds

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Stop these requests; called from the trainer's thread, while virtual time stands still."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._abort, None if request_ids is None else list(request_ids))
        return []

    def _abort(self, names: list[str] | None) -> None:
        waiting, self._waiting = self._waiting, collections.deque()
        wanted = set(self._flights if names is None else names)
        for name in list(self._flights) if names is None else names:
            for flight in self._flights.get(name, ()):
                if not flight.future.done():
                    self._land(flight, "abort")
        self._waiting.extend(flight for flight in waiting if flight.request.id not in wanted)
        self._start()

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def update_weights(self, source: Any, version: int, in_flight: InFlight = "abort") -> None:
        """Take the version."""
        if in_flight == "abort":
            self.abort()
        self.version = version

    def close(self) -> None:
        """Do nothing."""

    def _answer(self, flight: Flight, tokens: int, reason: str) -> Completion:
        request = flight.request
        rows = len(request.token_ids) + tokens - 1 - request.start
        routes = Routes.trusted(self.rows[:rows], SPEC, Runs.constant(True, rows), None) if tokens else None
        return Completion.assemble(
            request, flight.index, spec=SPEC, token_ids=[1] * tokens, logprobs=[-1.0] * tokens, routes=routes,
            versions=self.version, finish_reason=reason,
        )  # fmt: skip


class TimedPool(EnginePool):
    """The real pool over engines of virtual time. `seconds` is the virtual time that `generate` has taken."""

    seconds = 0.0

    def generate_each(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """Answer all samples of all requests, as one batch."""
        checked = self._checked_batch(requests)

        async def all_of_them() -> list[list[Completion]]:
            return await asyncio.gather(*(self.submit(request) for request in checked))

        loop = VirtualLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            answers = runner.run(all_of_them())
        self.seconds += loop.now
        return answers
