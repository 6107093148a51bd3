"""Put an engine into a Ray actor, and reach it from the first rank as any other engine.

The driver makes an empty `EngineActor` for each engine. The first rank starts the engine in it through a `RayEngine`.
If the process of the actor dies, Ray starts an empty one in its place. The pool of engines finds it without an engine,
and starts the engine again. If the first rank is a new process, the engine that runs goes on with the new weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pathlib
import threading
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from transformers.utils import logging as transformers_logging

from router_replay.engines import checks
from router_replay.engines.base import Engine, WeightSource
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.errors import EngineError, RouterReplayError
from router_replay.rl.cluster.folders import Received, SentFolder, send
from router_replay.rl.config import TrainConfig
from router_replay.rl.engine_start import start_engine
from router_replay.spec import RouterSpec

logger = logging.getLogger(__name__)
PING_SECONDS = 30.0
MESSAGE_SECONDS = 30.0
"""Seconds between two messages that name an engine that did not answer yet."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an engine is: the attributes that `Engine` has, and where it runs."""

    spec: RouterSpec
    capabilities: Capabilities
    vocabulary: int | None
    version: int
    pid: int


class EngineActor:
    """Hold one engine in a process of its own. `name` is that of the engine in messages.

    All methods are coroutines, because Ray then calls them at the same time.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine: Engine | None = None
        self._received = Received()
        self._starting = threading.Lock()

    async def where(self) -> tuple[str, int]:
        """Return the node of this actor, and its process id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def start(self, config: TrainConfig, weights: SentFolder, spec: RouterSpec, version: int) -> Facts:
        """Start the engine with these weights, or load them into the engine that runs already.

        `config` is that of the run, `spec` describes the routers of its policy, and `version` is that of the weights.
        """
        return await asyncio.to_thread(self._start, config, weights, spec, version)

    def _start(self, config: TrainConfig, weights: SentFolder, spec: RouterSpec, version: int) -> Facts:
        transformers_logging.disable_progress_bar()  # the first rank shows the progress of the run
        with self._starting:
            folder = self._received.open(weights)
            if self._engine is not None:
                try:
                    self._engine.ping()
                except EngineError:
                    self._engine.close()
                    self._engine = None
            if self._engine is None:
                self._engine = start_engine(config, folder, spec, version, config.all_engines[self._name])
            else:  # the process that used it has ended
                self._engine.abort()
                self._engine.resume()
                self._engine.update_weights(str(folder), version)
            engine = self._engine
            return Facts(engine.spec, engine.capabilities, engine.vocabulary, engine.version, os.getpid())

    async def submit(self, request: Request) -> list[Completion]:
        """Generate all samples of the `request`."""
        return await self._running().submit(request)

    async def update_weights(self, weights: SentFolder, version: int, in_flight: InFlight) -> None:
        """Load these `weights` as `version`; `in_flight` says what happens to running requests."""
        engine = self._running()

        def load() -> None:
            engine.update_weights(str(self._received.open(weights)), version, in_flight)

        await asyncio.to_thread(load)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call another `method` of the engine with these `arguments`."""
        return await asyncio.to_thread(getattr(self._running(), method), *arguments)

    async def close(self) -> None:
        """Close the engine, if there is one, and remove its copy of the weights."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        self._received.close()

    def _running(self) -> Engine:
        if self._engine is None:
            raise EngineError(f"{self._name} is a new process (pid {os.getpid()}) in which no engine was started yet")
        return self._engine


class RayEngine(Engine):
    """Represent an engine in a Ray actor.

    `name` is the name of the actor and of the engine in `config`. `folder` has the weights that it starts with, as
    `version`, and `spec` describes the routers of the policy. `close` leaves the actor to the driver.
    """

    def __init__(self, name: str, config: TrainConfig, folder: pathlib.Path, spec: RouterSpec, version: int) -> None:
        self._name = name
        self._closed = False
        self._patience = config.cluster.start_timeout
        try:
            self._actor = ray.get_actor(name)
        except ValueError as error:
            raise EngineError(f"{name} has no actor in this Ray cluster: {error}") from error
        self._node, _ = self._wait(self._actor.where.remote(), "is given a process", self._patience)
        sent = send(str(folder), self._node)
        facts = self._wait(self._actor.start.remote(config, sent, spec, version), "starts", self._patience)
        self.spec, self.capabilities, self.vocabulary = facts.spec, facts.capabilities, facts.vocabulary
        self.version, self.pid = facts.version, facts.pid

    async def submit(self, request: Request) -> list[Completion]:
        """Generate all samples of one `request`. A cancelled call frees its place in the engine."""
        self._refuse_closed()
        answer = self._actor.submit.remote(self._checked(request))
        try:
            return await answer
        except RayError as error:
            raise self._reason(error) from None
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort the requests `request_ids` (all if None), and return their output so far."""
        names = checks.request_ids(request_ids)
        return self._call("abort", None if names is None else sorted(names))

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Stop generating. `in_flight` means the same as in `Engine.pause`."""
        self._call("pause", in_flight)

    def resume(self) -> None:
        """Continue after a `pause`."""
        self._call("resume")

    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        """Load the weights of the folder `source` as `version`. `in_flight` is as in `Engine.update_weights`."""
        self._refuse_closed()
        if not isinstance(source, str | os.PathLike):
            raise EngineError(f"an engine in another process takes a folder of weights, got {type(source).__name__}")
        sent = send(os.fspath(source), self._node)
        self._wait(self._actor.update_weights.remote(sent, version, in_flight), f"loads version {version}")
        self.version = version

    def ping(self) -> None:
        """Raise EngineError if the process does not answer, or holds no engine, or the engine is not well."""
        self._refuse_closed()
        try:
            ray.get(self._actor.call.remote("ping"), timeout=PING_SECONDS)
        except RayError as error:
            raise self._reason(error) from None

    def report(self) -> dict[str, Any]:
        """Return the report of the engine in the actor, for engines that have one."""
        return self._call("report")

    def close(self) -> None:
        """End the use of the engine from here: later calls fail. The engine itself stays until the run ends."""
        self._closed = True

    def _call(self, method: str, *arguments: Any) -> Any:
        self._refuse_closed()
        return self._wait(self._actor.call.remote(method, *arguments), f"does {method}")

    def _wait(self, answer: Any, doing: str, limit: float | None = None) -> Any:
        """Return the answer of the actor. A message names this engine as long as it takes."""
        began = time.monotonic()
        while not ray.wait([answer], timeout=MESSAGE_SECONDS if limit is None else min(limit, MESSAGE_SECONDS))[0]:
            waited = time.monotonic() - began
            if limit is not None and waited >= limit:
                raise EngineError(
                    f"{self._name} {doing} for {waited:.0f} s without an end (cluster.start_timeout = {limit:g}): see "
                    "the log of its actor, or raise the setting"
                )
            logger.warning("waiting for %s, which %s for %.0f s now", self._name, doing, waited)
        try:
            return ray.get(answer)
        except RayError as error:
            raise self._reason(error) from None

    def _reason(self, error: RayError) -> RouterReplayError:
        """Return the error of the engine itself, or what became of its process."""
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, RouterReplayError):
                return cause
            return EngineError(f"{self._name}: {type(cause).__name__}: {cause}")
        if isinstance(error, GetTimeoutError):
            return EngineError(f"{self._name} did not answer within {PING_SECONDS:g} s")
        if isinstance(error, RayActorError):
            return EngineError(f"{self._name}: its process died or cannot be reached ({type(error).__name__})")
        return EngineError(f"{self._name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(f"{self._name}: this engine was closed: create a new one")
