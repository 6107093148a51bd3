"""A vLLM that plays a script: requests end when they are let, or aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from router_replay.engines.backend import Flight
from router_replay.engines.types import Capabilities, InFlight
from router_replay.engines.vllm.client import Transport
from router_replay.engines.vllm.samples import Sample
from router_replay.spec import RouterSpec
from tests.makers import random_routes

SPEC = RouterSpec(16, 4, (0, 1))
PROMPT = (5, 6, 7)


class Script(Transport):
    """A vLLM whose requests end when they are let, or aborted; loads do what `load` says."""

    spec = SPEC
    capabilities = Capabilities(routes=True, forced_routes=True, start=True, versions=True, why_not="")

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[str]] = {}
        self.salts: list[str] = []
        self.paused = False
        self.resets = True
        self.rows = True
        self.deaf = False  # to aborts
        self.load: Callable[[], dict[str, Any]] = lambda: {"reason": "", "progress": {}}
        self.other_ranks: list[dict[str, Any]] = []  # what the other data-parallel ranks answer to a load

    async def generate(self, flight: Flight) -> list[Sample]:
        self.salts.append(flight.salt)
        self.running[flight.name] = asyncio.get_running_loop().create_future()
        try:
            reason = await self.running[flight.name]
        finally:
            del self.running[flight.name]
        rows = random_routes(len(flight.request.token_ids) + 1, SPEC) if self.rows else None
        return [Sample(0, [8, 9], [-1.0, -2.0], rows, reason)]

    def finish(self, reason: str = "length") -> None:
        for future in list(self.running.values()):
            future.get_loop().call_soon_threadsafe(lambda future=future: future.done() or future.set_result(reason))

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            if not self.deaf and name in self.running and not self.running[name].done():
                self.running[name].set_result("abort")

    async def pause(self, mode: InFlight) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        if method == "router_replay_find_weights":
            return [{"reason": ""}]
        await asyncio.sleep(0.05)
        return [self.load(), *self.other_ranks]

    async def reset_prefix_cache(self) -> bool:
        return self.resets

    async def close(self) -> None:
        self.finish()
