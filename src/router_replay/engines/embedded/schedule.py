"""Who is in the batch: requests join and leave between two passes, and barriers stop the traffic where asked.

A barrier is something that happens between two passes with the requests in flight settled: a pause, a weight swap.
Barriers pass in the order of their calls. All of this runs on the engine's thread.
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
from router_replay.engines.types import Completion, InFlight
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec


@dataclasses.dataclass(eq=False)
class Barrier:
    """`prepare` may fail before a request is touched; `act` runs when all that came before are settled.

    While a barrier is open, no request joins the batch but those it waits for.
    """

    in_flight: InFlight
    prepare: Callable[[], None]
    act: Callable[[], None]
    future: concurrent.futures.Future[None]
    before: Sequence[Flight] = ()  # in flight when it was called: a request that comes later is not its business
    is_open: bool = False
    waits_for: Sequence[Flight] = ()


class Schedule:
    """The requests of one engine. `version` is that of the weights that the next pass runs with."""

    def __init__(self, runner: Runner, spec: RouterSpec, version: int, max_batch: int, max_prefill_tokens: int) -> None:
        self.version = version
        self.paused = False
        self.broken = ""  # why the weights are unknown, where they are
        self._barriers: collections.deque[Barrier] = collections.deque()
        self._runner = runner
        self._spec = spec
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._flights: dict[Flight, None] = {}
        self._waiting: list[Sample] = []

    def join(self, *flights: Flight) -> None:
        if self.broken:
            raise EngineError(self.broken)
        names = [flight.request.id for flight in self._flights if not flight.future.cancelled()]
        for name, count in collections.Counter([*names, *(flight.request.id for flight in flights)]).items():
            if count > 1:
                raise EngineError(f"{name}: a request of this id is in flight; give each an id of its own")
        for flight in flights:
            self._flights[flight] = None
            self._waiting += flight.samples

    def abort(self, wanted: Sequence[str] | None) -> list[Completion]:
        """Land these requests as they are, or all. Names of nobody who is in flight are passed over."""
        return self._bring_down([flight for flight in self._flights if wanted is None or flight.request.id in wanted])

    def _bring_down(self, flights: Sequence[Flight]) -> list[Completion]:
        completions = [completion for flight in flights for completion in flight.land(self._spec)]
        self.land()
        return completions

    def add(self, barrier: Barrier) -> None:
        barrier.before = list(self._flights)
        self._barriers.append(barrier)

    def end(self, reason: str) -> None:
        """Nothing goes on: everybody who waits is told why."""
        for flight in self._flights:
            flight.fail(EngineError(f"{flight.request.id}: {reason}"))
        for barrier in self._barriers:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it passed, and the thread died after
                barrier.future.set_exception(EngineError(reason))

    def fail_all(self, reason: str) -> None:
        for flight in self._flights:
            flight.fail(EngineError(f"{flight.request.id}: {reason}"))
        self.land()

    def has_work(self) -> bool:
        if self._barriers and not self._must_wait(self._barriers[0]):
            return True
        return not self.paused and bool(self._runner.samples or self._admissible())

    def advance(self) -> None:
        """Let one group of prompts join, and give a token to every sample that was running before."""
        if self.paused:
            return
        running = bool(self._runner.samples)
        joining = self._admissible()
        if joining:
            chosen = set(joining)
            self._waiting = [sample for sample in self._waiting if sample not in chosen]
            self._runner.prefill(joining, self.version)
        if running and self._runner.samples:
            self._runner.decode(self.version)
        self.land()

    def land(self) -> None:
        """Answer what is through, and forget what has an answer or is not waited for any more."""
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
        """Let each barrier act whose requests are settled, up to the first that has to wait."""
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

    def _admissible(self) -> list[Sample]:
        """The samples that may join now, in order: of one prompt length, so that no pass needs padding."""
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
