"""Schedules the batch: requests join and leave between two passes, and barriers block new requests.

A barrier is an action between two passes, such as a pause or a weight swap, that runs once the requests in flight are
settled. Barriers run in the order of their calls. All of this runs on the engine's thread.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from router_replay.engines.base import PAUSED_FINISHES_NOTHING
from router_replay.engines.embedded.runner import Runner
from router_replay.engines.embedded.samples import Flight, Sample
from router_replay.engines.pass_order import PassOrder
from router_replay.engines.types import Completion, InFlight
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec


@dataclasses.dataclass(eq=False)
class Barrier:
    """Describes a pending action. `prepare` may fail before any request is affected; `act` runs after settling.

    `act` runs when all earlier requests are settled. While a barrier is pending, only the requests that it waits for
    may join the batch.
    """

    in_flight: InFlight
    prepare: Callable[[], None]
    act: Callable[[], None]
    future: concurrent.futures.Future[None]
    before: Sequence[Flight] = ()  # in flight when it was called; later requests are not affected
    is_open: bool = False
    waits_for: Sequence[Flight] = ()


class Schedule:
    """Manages the requests of one engine. `version` is the version of the weights used by the next pass."""

    def __init__(self, runner: Runner, spec: RouterSpec, version: int, max_batch: int, max_prefill_tokens: int) -> None:
        self.version = version
        self.paused = False
        self.order = PassOrder()
        self.broken = ""  # the reason why the weights are unknown, if they are
        self._barriers: collections.deque[Barrier] = collections.deque()
        self._runner = runner
        self._spec = spec
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._flights: dict[Flight, None] = {}
        self._waiting: list[Sample] = []

    def join(self, *flights: Flight) -> None:
        """Add requests, which start when there is room. Raises EngineError if an id is already in flight."""
        if self.broken:
            raise EngineError(self.broken)
        names = [flight.request.id for flight in self._flights if not flight.future.cancelled()]
        for name, count in collections.Counter([*names, *(flight.request.id for flight in flights)]).items():
            if count > 1:
                raise EngineError(f"{name}: another request with this id is in flight: give every request a unique id")
        for flight in flights:
            self._flights[flight] = None
            self._waiting += flight.samples

    def abort(self, wanted: Sequence[str] | None) -> list[Completion]:
        """End these requests (all if None) with their output so far, and return it. Unknown ids are ignored."""
        flights = [flight for flight in self._flights if wanted is None or flight.request.id in wanted]
        self.order.aborts(wanted if wanted is not None else [flight.request.id for flight in flights])
        return self._bring_down(flights)

    def _bring_down(self, flights: Sequence[Flight]) -> list[Completion]:
        completions = [completion for flight in flights for completion in flight.land(self._spec)]
        self.land()
        return completions

    def add(self, barrier: Barrier) -> None:
        """Append a barrier, which applies to the requests that are in flight now."""
        barrier.before = list(self._flights)
        self._barriers.append(barrier)

    def end(self, reason: str) -> None:
        """Stop everything, and fail all waiting calls with the reason."""
        for flight in self._flights:
            flight.fail(EngineError(f"{flight.request.id}: {reason}"))
        for barrier in self._barriers:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it had completed before the thread died
                barrier.future.set_exception(EngineError(reason))

    def fail_all(self, reason: str) -> None:
        """Fail all requests in flight with the reason; barriers stay."""
        for flight in self._flights:
            flight.fail(EngineError(f"{flight.request.id}: {reason}"))
        self.land()

    def has_work(self) -> bool:
        """Return whether a barrier or a pass can run now."""
        if self._barriers and not self._must_wait(self._barriers[0]):
            return True
        if self.paused:
            return False
        if self.order.decides:
            return self._ordered() is not None
        return bool(self._runner.samples or self._admissible())

    def advance(self) -> None:
        """Add one group of prompts to the batch, and generate a token for every sample that was already running."""
        if self.paused:
            return
        joining = self._ordered() if self.order.decides else self._admissible()
        if joining is None:
            return
        running, decoding = bool(self._runner.samples), list[str]()
        if joining:
            chosen = set(joining)
            self._waiting = [sample for sample in self._waiting if sample not in chosen]
            self._runner.prefill(joining, self.version)
        if running and self._runner.samples:
            decoding = _names(self._runner.samples)
            self._runner.decode(self.version)
        if joining or decoding:
            self.order.passed(_names(joining), decoding)
        self.land()

    def land(self) -> None:
        """Answer finished requests, and remove those that are answered or no longer awaited."""
        landed = []
        for flight in self._flights:
            if flight.future.cancelled():
                flight.landed = True
            elif not flight.landed and all(sample.finish for sample in flight.samples):
                flight.land(self._spec)
            if flight.landed:
                landed.append(flight)
        for flight in landed:
            del self._flights[flight]
        if landed:
            self._waiting = [sample for sample in self._waiting if not sample.flight.landed]
            self._runner.drop_landed()

    def pass_barriers(self) -> None:
        """Run the barriers whose requests are settled, up to the first that has to wait."""
        while self._barriers:
            barrier = self._barriers[0]
            try:
                if not barrier.is_open:
                    barrier.is_open = True
                    barrier.prepare()
                    self._settle(barrier)
                if self._must_wait(barrier):
                    return
                barrier.act()
            except Exception as error:
                barrier.future.set_exception(error)
            else:
                barrier.future.set_result(None)
            self._barriers.popleft()

    def _must_wait(self, barrier: Barrier) -> bool:
        return any(flight in self._flights for flight in barrier.waits_for)

    def _settle(self, barrier: Barrier) -> None:
        flights = [flight for flight in barrier.before if flight in self._flights]
        if barrier.in_flight == "abort":
            self._bring_down(flights)
        elif barrier.in_flight == "wait" and flights:
            if self.paused:
                raise EngineError(PAUSED_FINISHES_NOTHING)
            barrier.waits_for = flights

    def _ordered(self) -> list[Sample] | None:
        """Return the samples that `order` wants in the next pass; None if it wants no pass, or has to wait for one."""
        wanted = self.order.joining()
        if wanted is None:
            return None
        by_name: dict[str, list[Sample]] = {}
        for sample in self._waiting:
            by_name.setdefault(sample.flight.request.id, []).append(sample)
        if any(name not in by_name for name in wanted):
            return None
        return [sample for name in dict.fromkeys(wanted) for sample in by_name[name]]

    def _admissible(self) -> list[Sample]:
        """Return the samples that may join now, in order; all have one prompt length, so no pass needs padding."""
        room = self._max_batch - len(self._runner.samples)
        group: list[Sample] = []
        prompts: set[Flight] = set()
        for sample in self._waiting:
            flight = sample.flight
            if len(group) >= room:
                break
            if self._barriers and flight not in self._barriers[0].waits_for:
                continue
            if group and len(flight.tokens) != len(group[0].flight.tokens):
                continue
            if group and len({*prompts, flight}) * len(flight.tokens) > self._max_prefill_tokens:
                break
            prompts.add(flight)
            group.append(sample)
        return group


def _names(samples: Sequence[Sample]) -> list[str]:
    """Return the ids of the requests of these samples, each as often as it has samples here."""
    return [sample.flight.request.id for sample in samples]
