"""Implements the engine protocol over several engines, of any kinds, that hold the same model.

    pool = EnginePool({"a": VllmHttpEngine(url_a), "b": VllmHttpEngine(url_b)})
    completions = await pool.submit(request)                    # on the engine that has the prefix, or the least busy
    pool.update_weights(folder, version=1, in_flight="keep")    # on all of them

An engine that fails is tested. If it does not answer, it is set aside, its requests go to the others, and it is tried
again until it answers; it gets the current weights before it gets requests. An error of an engine that does answer is
the caller's, as with a single engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from router_replay.engines import checks
from router_replay.engines.base import Engine, WeightSource, check_in_flight
from router_replay.engines.pool.loads import Loads
from router_replay.engines.pool.prefixes import PrefixMap
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.errors import EngineError

logger = logging.getLogger(__name__)
WAIT = 0.05  # seconds between two looks of a request that waits for an engine
LONGEST_PAUSE = 30.0  # seconds between two attempts to reach an engine that was set aside
T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class _Member:
    """One engine of the pool. `lost` is the reason why it gets no requests; empty if it gets some."""

    name: str
    engine: Engine
    lost: str = ""
    updating: bool = False
    served: int = 0  # requests answered
    attempts: int = 0  # to reach it since it was set aside
    try_at: float = 0.0
    flights: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = dataclasses.field(default_factory=dict)


class EnginePool(Engine):
    """Represents several running engines of one model as one.

    `engines` are the engines by name. `connect` has a function for each engine that can be reached again after it
    died, which returns a new engine in its place; without one, the old object is asked whether it answers again.

    A request goes to the engine that computed the longest part of its prompt, unless that one has `slack` more samples
    in flight than the least busy one, to which it goes then. If a request moves to another engine and has
    `known_routes`, they are forced there, if that engine can do it. `at_once` is the number of engines that load new
    weights at the same time; the others go on meanwhile. By default all of them do. `health_seconds` is the time
    between two tests of every engine. If no engine answers, requests wait for `patience` seconds before they fail.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        connect: Mapping[str, Callable[[], Engine]] | None = None,
        slack: int = 32,
        at_once: int | None = None,
        health_seconds: float = 5.0,
        patience: float = 60.0,
    ) -> None:
        if not engines:
            raise EngineError("a pool needs at least one engine, got none")
        unknown = sorted(set(connect or {}) - set(engines))
        if unknown:
            raise EngineError(f"connect has functions for engines that are not in the pool: {unknown}")
        self._members = [_Member(name, engine) for name, engine in engines.items()]
        self._by_name = {member.name: member for member in self._members}
        self._loads = Loads(self._members)
        self._connect = dict(connect or {})
        self._slack = checks.integer(slack, "slack", 0, 1 << 31)
        self._at_once = checks.integer(at_once if at_once is not None else len(engines), "at_once", 1, 1 << 31)
        self._health_seconds = checks.seconds(health_seconds, "health_seconds")
        self._patience = checks.seconds(patience, "patience")
        _same([(member.name, member.engine.spec) for member in self._members], "spec")
        self.spec = self._members[0].engine.spec
        self.capabilities = _together([member.engine.capabilities for member in self._members])
        sizes = [member.engine.vocabulary for member in self._members if member.engine.vocabulary is not None]
        self.vocabulary = min(sizes, default=None)
        self.version = _same([(member.name, member.engine.version) for member in self._members], "version")
        self._prefixes = PrefixMap()
        self._lock = threading.Lock()  # for what follows, and the members
        self._flights: dict[str, _Member | None] = {}  # the engine of each request; None: it waits for one
        self._stopped: set[str] = set()  # waiting requests that were aborted
        self._paused = False
        self._control = threading.RLock()  # pauses, updates and returns of engines run one after the other
        self._weights: tuple[Any, int] | None = None  # the last ones that were loaded
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="router-replay-pool", daemon=True)
        self._watcher.start()

    # -- requests -------------------------------------------------------------------------------

    async def submit(self, request: Request) -> list[Completion]:
        """Generate all samples of one `request`, on another engine if its engine dies."""
        request = self._checked(request)
        self._enter(request)
        try:
            while True:
                member = await self._choose(request)
                if member is None:
                    return Completion.nothing(request, self.spec)
                loop = asyncio.get_running_loop()
                answer = loop.create_task(member.engine.submit(self._for(member, request)))
                with self._lock:
                    member.flights[request.id] = (loop, answer)
                try:
                    completions = await answer
                except EngineError as error:
                    if not await asyncio.to_thread(self._is_lost, member, error):
                        raise
                    continue
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if not member.lost or (task is not None and task.cancelling()):
                        raise  # the caller has gone; otherwise `_set_aside` took the request from a silent engine
                    continue
                finally:
                    with self._lock:
                        self._loads.add(member, -request.sampling.n)
                        member.flights.pop(request.id, None)
                        self._flights[request.id] = None
                with self._lock:
                    member.served += 1
                    self._prefixes.remember([*request.token_ids, *completions[0].token_ids.tolist()], member.name)
                return completions
        finally:
            with self._lock:
                self._flights.pop(request.id, None)
                self._stopped.discard(request.id)

    def _enter(self, request: Request) -> None:
        with self._lock:
            if self._closed.is_set():
                raise EngineError("this pool was closed: create a new one")
            if request.id in self._flights:
                raise EngineError(
                    f"{request.id}: another request with this id is in flight: give every request a unique id"
                )
            self._flights[request.id] = None

    async def _choose(self, request: Request) -> _Member | None:
        """Return the engine for a request, when there is one; None if the request was aborted meanwhile."""
        deadline = time.monotonic() + self._patience
        while True:
            with self._lock:
                if request.id in self._stopped:
                    return None
                member = self._best(request)
                if member is not None:
                    self._loads.add(member, request.sampling.n)
                    self._flights[request.id] = member
                    return member
                reasons = self._reasons()
            if self._closed.is_set():
                raise EngineError(f"{request.id}: the pool was closed before an engine answered this request")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{request.id}: no engine of the pool answers, for {self._patience:g} seconds: {reasons}"
                )
            await asyncio.sleep(WAIT)

    def _best(self, request: Request) -> _Member | None:
        least, running = self._loads.least()
        if least.lost or least.updating:
            well = [member for member in self._members if not member.lost]
            ready = [member for member in well if not member.updating] or well
            if not ready:
                return None
            least = min(ready, key=lambda member: (self._loads.of(member), member.served))
            running = self._loads.of(least)
        sticky = self._by_name.get(self._prefixes.find(request.token_ids) or "", least)
        if sticky.lost or (sticky.updating and not least.updating):
            return least
        return sticky if self._loads.of(sticky) <= running + self._slack else least

    def _for(self, member: _Member, request: Request) -> Request:
        """Return the request with its known rows forced if this engine did not compute them."""
        known = request.known_routes
        if known is None or request.forced_routes is not None or not member.engine.capabilities.forced_routes:
            return request
        with self._lock:
            moved = self._prefixes.find(request.token_ids) != member.name
        return dataclasses.replace(request, forced_routes=known) if moved and known.captured.any() else request

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort the requests `request_ids` (all if None), and return their output so far."""
        names = checks.request_ids(request_ids)
        with self._lock:
            known = self._flights if names is None else (name for name in names if name in self._flights)
            wanted = {name: self._flights[name] for name in known}
            self._stopped |= {name for name, member in wanted.items() if member is None}
        by_member: dict[_Member, list[str]] = {}
        for name, member in wanted.items():
            if member is not None:
                by_member.setdefault(member, []).append(name)
        parts = self._each(list(by_member), lambda member: member.engine.abort(by_member[member]))
        return [completion for part in parts for completion in part or ()]

    # -- all engines ----------------------------------------------------------------------------

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Hold all engines; later requests wait for `resume`. `in_flight` means the same as in `Engine.pause`."""
        check_in_flight(in_flight)
        with self._control:
            self._each(self._well(), lambda member: member.engine.pause(in_flight))
            self._paused = True

    def resume(self) -> None:
        """Let all engines go on."""
        with self._control:
            self._each(self._well(), lambda member: member.engine.resume())
            self._paused = False

    @contextlib.contextmanager
    def without_returns(self) -> Iterator[None]:
        """Let no engine return to the pool within the block.

        An engine that returns loads the weights of the last update. Whoever overwrites them, such as memory that all
        versions share, does it in such a block, which ends after the next `update_weights`.
        """
        with self._control:
            yield

    def update_weights(
        self, source: WeightSource | Callable[[str], WeightSource], version: int, in_flight: InFlight = "abort"
    ) -> None:
        """Load new weights as `version` into all engines, `at_once` at a time.

        `in_flight` is as in `Engine.update_weights`. `source` may also be a function
        that returns the source for an engine, given its name. An engine that does not answer gets the weights when it
        answers again, so `source` must stay valid until the next update. Raises EngineError if an engine that answers
        refuses the weights, or if no engine took them.
        """
        version, in_flight = checks.version(version), check_in_flight(in_flight)
        with self._control:
            refusals: list[str] = []

            def update(member: _Member) -> bool:
                member.updating = True
                try:
                    member.engine.update_weights(_source_of(source, member.name), version, in_flight)
                except EngineError as error:
                    if not self._is_lost(member, error):
                        refusals.append(f"{member.name}: {error}")
                    return False
                finally:
                    member.updating = False
                return True

            done = self._each(self._well(), update, self._at_once)
            if refusals:
                raise EngineError("; ".join(refusals))
            if not any(done):
                raise EngineError(f"no engine of the pool took version {version}: {self._reasons()}")
            self.version, self._weights = version, (source, version)  # what an engine that returns gets

    def ping(self) -> None:
        """Raise EngineError if no engine of the pool answers."""
        with self._lock:
            if not any(not member.lost for member in self._members):
                raise EngineError(f"no engine of the pool answers: {self._reasons()}")

    def report(self) -> dict[str, dict[str, Any]]:
        """Return for each engine its kind, requests served, samples in flight, version, and why it is not in use."""
        with self._lock:
            return {
                member.name: {
                    "kind": type(member.engine).__name__,
                    "served": member.served,
                    "running": self._loads.of(member),
                    "version": member.engine.version,
                    "lost": member.lost,
                }
                for member in self._members
            }

    def close(self) -> None:
        """Close all engines."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        with self._control, contextlib.suppress(EngineError):
            self._each(self._members, lambda member: member.engine.close(), every=True)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=10)

    def _each(
        self, members: Sequence[_Member], work: Callable[[_Member], T], at_once: int | None = None, every: bool = False
    ) -> list[T | None]:
        """Call `work` for these engines, in threads. An engine that dies in it is set aside, and has None as result.

        With `every`, an engine that died before is called as well, and no engine is tested.
        """

        def guarded(member: _Member) -> T | None:
            try:
                return work(member)
            except EngineError as error:
                if every or not self._is_lost(member, error):
                    raise
                return None

        if len(members) <= 1:
            return [guarded(member) for member in members]
        with ThreadPoolExecutor(min(len(members), at_once or len(members))) as threads:
            return list(threads.map(guarded, members))

    def _well(self) -> list[_Member]:
        with self._lock:
            return [member for member in self._members if not member.lost]

    def _reasons(self) -> str:
        return "; ".join(f"{member.name}: {member.lost}" for member in self._members if member.lost)

    # -- engines that die and return ------------------------------------------------------------

    def _is_lost(self, member: _Member, error: EngineError) -> bool:
        """Return whether the engine is set aside, after a test if that is not known yet. `error` is what it raised."""
        if self._closed.is_set():
            return False
        if member.lost:
            return True
        try:
            member.engine.ping()
        except EngineError as reason:
            self._set_aside(member, f"{error} (asked again: {reason})")
            return True
        return False

    def _set_aside(self, member: _Member, reason: str) -> None:
        with self._lock:
            if member.lost:
                return
            member.lost, member.attempts, member.try_at = reason, 0, 0.0
            flights = list(member.flights.values())
        for loop, answer in flights:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(answer.cancel)
        logger.warning("engine %s does not answer and gets no more requests: %s", member.name, reason)

    def _watch(self) -> None:
        """Test the engines from time to time, and bring back those that answer again."""
        while not self._closed.wait(self._health_seconds):
            for member in self._members:
                if self._closed.is_set():
                    return
                if not member.lost:
                    if not member.updating:
                        self._is_lost(member, EngineError("it did not pass the regular test"))
                elif time.monotonic() >= member.try_at:
                    self._bring_back(member)

    def _bring_back(self, member: _Member) -> None:
        try:
            with self._control:
                self._reconnect(member)
                if self._closed.is_set():
                    member.engine.close()
                    return
                with self._lock:
                    member.lost = ""
        except Exception as error:  # the functions of `connect` are the caller's
            with self._lock:
                member.lost = f"{type(error).__name__}: {error}"
                member.attempts += 1
                pause = min(self._health_seconds * 2**member.attempts, LONGEST_PAUSE)
                member.try_at = time.monotonic() + pause
            return
        logger.warning("engine %s answers again, with version %d", member.name, self.version)

    def _reconnect(self, member: _Member) -> None:
        """Make the engine ready for requests: reachable, with the current weights, and held if the pool is."""
        if member.name in self._connect:
            engine = self._connect[member.name]()
            with contextlib.suppress(EngineError):
                member.engine.close()
            member.engine = engine
        member.engine.ping()
        _same([("the pool", self.spec), (member.name, member.engine.spec)], "spec")
        if self._weights is not None:
            source, version = self._weights
            member.engine.update_weights(_source_of(source, member.name), version)
        if self._paused:
            member.engine.pause("keep")


def _source_of(source: Any, name: str) -> WeightSource:
    return source(name) if callable(source) else source


def _together(all_of_them: Sequence[Capabilities]) -> Capabilities:
    """Return what all engines can do, with the reasons of those that cannot."""

    def every(name: str) -> bool:
        return all(getattr(one, name) for one in all_of_them)

    def reasons(name: str) -> str:
        return "; ".join(dict.fromkeys(getattr(one, name) for one in all_of_them if getattr(one, name)))

    return Capabilities(
        routes=every("routes"),
        forced_routes=every("forced_routes"),
        start=every("start"),
        versions=every("versions"),
        checked_weights=every("checked_weights"),
        seeds=every("seeds"),
        cannot_keep=reasons("cannot_keep"),
        why_not=reasons("why_not"),
    )


def _same(values: Iterable[tuple[str, T]], what: str) -> T:
    """Return the value that all have; raise EngineError with the names if they differ."""
    (first, value), *others = values
    for name, other in others:
        if other != value:
            raise EngineError(
                f"all engines of a pool must have the same {what}: {first} has {value}, and {name} has {other}"
            )
    return value
