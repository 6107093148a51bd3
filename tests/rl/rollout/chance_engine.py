"""An engine without a model: a thread gives random requests their next token, so every run is another schedule."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from router_replay.engines.base import Engine
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.errors import EngineError
from router_replay.rl.environments.base import Environment, Turn
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(0, 1))


class Flight:
    def __init__(self, request: Request, length: int) -> None:
        self.request, self.length = request, min(length, request.sampling.max_tokens)
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.future: concurrent.futures.Future[list[Completion]] = concurrent.futures.Future()

    def land(self, reason: str) -> Completion:
        rows = len(self.request.token_ids) + len(self.tokens) - 1
        ids = np.tile(np.array([[0, 1], [2, 3]], np.uint8), (rows, 1, 1))
        completion = Completion.assemble(
            self.request,
            0,
            spec=SPEC,
            token_ids=self.tokens,
            logprobs=[-1.0] * len(self.tokens),
            routes=Routes(ids, SPEC)[self.request.start :] if self.tokens else None,
            versions=self.versions,
            finish_reason=reason,
        )
        if not self.future.done():
            self.future.set_result([completion])
        return completion


class ChanceEngine(Engine):
    """`longest` bounds the answers, most of which are short. `fails` is the chance that a request fails."""

    spec, vocabulary = SPEC, 100
    capabilities = Capabilities(routes=True, forced_routes=True, start=True, versions=True)

    def __init__(self, seed: int, version: int = 0, longest: int = 60, fails: float = 0.0) -> None:
        self.version, self._fails, self._longest = version, fails, longest
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> list[Completion]:
        checked = self._checked(request)
        with self._lock:
            if self._random.random() < self._fails:
                raise EngineError(f"{request.id}: by chance")
            flight = Flight(checked, int(self._longest * self._random.random() ** 4) + 1)
            self._flights[request.id] = flight
        return await asyncio.wrap_future(flight.future)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        with self._lock:
            wanted = list(self._flights) if request_ids is None else list(request_ids)
            landed = [self._flights.pop(name) for name in wanted if name in self._flights]
        return [flight.land("abort") for flight in landed]

    def pause(self, in_flight: InFlight = "keep") -> None: ...

    def resume(self) -> None: ...

    def update_weights(self, source: Any, version: int, in_flight: InFlight = "abort") -> None:
        if in_flight == "abort":
            self.abort()
        with self._lock:
            self.version = version

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(0.0002):
            with self._lock:
                names = list(self._flights)
                for name in self._random.sample(names, k=min(len(names), 8)):
                    flight = self._flights[name]
                    flight.tokens.append(self._random.randrange(100))
                    flight.versions.append(self.version)
                    if len(flight.tokens) >= flight.length:
                        del self._flights[name]
                        flight.land("length")


class ChanceTask:
    """One to three turns; the reward is that of the first token, so some groups have no signal."""

    stop_token_ids: tuple[int, ...] = ()
    problems: int | None = None
    max_turns = 3
    digest = "chance"

    def prompt_lengths(self) -> list[tuple[str, int]]:
        return []

    def environment(self) -> Environment:
        return ChanceEnvironment()


class ChanceEnvironment:
    def reset(self, problem: int) -> Sequence[int]:
        return (5, problem % 90)

    def step(self, token_ids: Sequence[int]) -> Turn:
        return Turn(float(token_ids[0] % 2), done=token_ids[0] % 3 > 0, observation=(9,))
