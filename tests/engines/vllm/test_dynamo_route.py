"""The route that the plugin adds to Dynamo's worker, on a stand-in for Dynamo's handler (`make test-dynamo` has the
real one)."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router_replay.engines.vllm.plugin import dynamo
from router_replay.engines.vllm.plugin.dynamo import EngineRoute


class Handler:
    """As much of Dynamo's handler as the route uses."""

    def __init__(self) -> None:
        self.engine_client = self
        self._pause_lock, self._paused = asyncio.Lock(), False
        self.calls: list[Any] = []
        self.ended: dict[str, asyncio.Event] = {}

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append((method, kwargs))
        return [{"reason": ""}, {"reason": ""}]

    async def reset_prefix_cache(self) -> bool:
        return True

    async def abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["request_id"] in self.ended:
            self.ended[body["request_id"]].set()
        return {"status": "ok"}

    async def generate_tokens(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        self.ended[request_id] = asyncio.Event()
        yield {"token_ids": [5]}
        await self.ended[request_id].wait()
        yield {"token_ids": [], "finish_reason": "cancelled"}


def test_calls_return_what_every_process_answers() -> None:
    async def work() -> None:
        handler = Handler()
        route = EngineRoute(handler)
        answer = await route({"method": "router_replay_find_weights", "kwargs": {"source": "{}"}})
        assert answer == {"status": "ok", "results": [{"reason": ""}, {"reason": ""}]}
        refused = await route({"method": "router_replay_update_weights", "kwargs": {"source": "{}"}})
        assert (refused["status"], "pause_generation first" in refused["message"]) == ("error", True)
        handler._paused = True
        assert (await route({"method": "router_replay_update_weights", "kwargs": {"source": "{}"}}))["status"] == "ok"
        assert await route({"method": "reset_prefix_cache"}) == {"status": "ok", "reset": True}
        assert [method for method, _ in handler.calls] == ["router_replay_find_weights", "router_replay_update_weights"]
        for body in ({"method": "load_model"}, {}, None):  # no other method of the workers can be called
            assert (await route(body))["status"] == "error"

    asyncio.run(work())


def test_only_requests_that_the_route_aborts_keep_their_tokens() -> None:
    async def work() -> None:
        handler = Handler()
        route = EngineRoute(handler)

        async def ended(name: str) -> str:
            parts = [part async for part in handler.generate_tokens([1], None, name)]
            return str(parts[-1]["finish_reason"])

        ours, theirs = asyncio.create_task(ended("ours")), asyncio.create_task(ended("theirs"))
        await asyncio.sleep(0)
        await route({"method": "abort", "request_ids": ["ours", "nobody"]})
        await handler.abort_request({"request_id": "theirs"})
        assert [await ours, await theirs] == ["stop", "cancelled"]
        # A name that was too early leaves nothing behind.
        later = asyncio.create_task(ended("nobody"))
        await asyncio.sleep(0)
        await handler.abort_request({"request_id": "nobody"})
        assert await later == "cancelled"

    asyncio.run(work())


def test_without_dynamo_nothing_is_installed_and_another_dynamo_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "dynamo.vllm.worker_factory", raising=False)
    dynamo.install()
    for name in ("dynamo", "dynamo.vllm", "dynamo.vllm.worker_factory"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    dynamo.install()
    assert "adds no route to this Dynamo worker" in caplog.text
    assert "WorkerFactory" in caplog.text


def test_the_route_is_added_with_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[str, Any] = {}

    class WorkerFactory:
        def register_engine_routes(
            self, runtime: Any, generate_endpoint: Any, handler: Any, lora: bool = False
        ) -> None:
            runtime.register_engine_route("own", handler)

    runtime = types.SimpleNamespace(register_engine_route=lambda name, call: added.update({name: call}))
    WorkerFactory.register_engine_routes = dynamo._registering(WorkerFactory.register_engine_routes)  # type: ignore[method-assign]
    WorkerFactory().register_engine_routes(runtime, None, handler=Handler())
    assert list(added) == ["own", "router_replay"]
    assert isinstance(added["router_replay"], EngineRoute)
