"""Add one route to Dynamo's vLLM worker: `POST /engine/router_replay`.

Dynamo has routes for weights that call a method of the vLLM workers, but it drops what the method returns, so a client
learns neither the plugin's report nor how far each request had come when weights changed. The route added here returns
the answers:

    {"method": "router_replay_report"}                                    -> {"status": "ok", "results": [...]}
    {"method": "router_replay_update_weights", "kwargs": {"source": ...}} -> the same; only while paused
    {"method": "reset_prefix_cache"}                                      -> {"status": "ok", "reset": true}
    {"method": "abort", "request_ids": [...]}                             -> {"status": "ok"}

Dynamo's `/inference/v1/generate` drops the tokens of an aborted request (status 499). A request that is aborted by this
route ends with finish_reason "stop" and keeps its tokens and rows; the client knows which requests it aborted.

In a process that is no Dynamo worker, `install` does nothing.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.plugin.seams import Seam

ROUTE = "router_replay"
REPORT, FIND, UPDATE = "router_replay_report", "router_replay_find_weights", "router_replay_update_weights"

# Not in the table of seams.py: these places exist only where Dynamo is installed.
SEAMS = (
    Seam(
        "dynamo.vllm.worker_factory:WorkerFactory",
        "register_engine_routes",
        "wrapped",
        "the route is added when the worker registers its own",
        ("runtime", "handler", "register_engine_route"),
    ),
    Seam(
        "dynamo.vllm.handlers:BaseWorkerHandler",
        "generate_tokens",
        "wrapped on the object",
        "a request that our client aborts keeps its tokens",
        ("prompt", "sampling_params", "request_id"),
    ),
    Seam(
        "dynamo.vllm.handlers:BaseWorkerHandler",
        "resume_generation",
        "read",
        "weights change under the lock of pauses, and only while paused",
        ("_pause_lock", "_paused", "engine_client"),
    ),
)


def install() -> None:
    """Add the route if this process is a Dynamo worker. If Dynamo has changed, log what does not fit instead."""
    if "dynamo.vllm.worker_factory" not in sys.modules:
        return
    problems = [problem for seam in SEAMS if (problem := seam.problem())]
    if problems:
        reason = "; ".join(problems)
        logging.getLogger("vllm.router_replay").error("Router Replay adds no route to this Dynamo worker: %s", reason)
        return
    seams.wrap(sys.modules["dynamo.vllm.worker_factory"].WorkerFactory, "register_engine_routes", _registering)


def _registering(original: Any) -> Any:
    def register_engine_routes(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        given = inspect.signature(original).bind(self, *arguments, **more).arguments
        given["runtime"].register_engine_route(ROUTE, EngineRoute(given["handler"]))

    return register_engine_routes


class EngineRoute:
    """Answer the calls of one worker's route. `handler` is Dynamo's own handler of requests."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        handler.generate_tokens = self._keeping_tokens(handler.generate_tokens)

    async def __call__(self, body: Any) -> dict[str, Any]:
        """Answer one call. A failure is an answer with status "error", as in Dynamo's own routes."""
        calls: dict[Any, Callable[[Any], Awaitable[dict[str, Any]]]] = {
            REPORT: self._call,
            FIND: self._call,
            UPDATE: self._update,
            "reset_prefix_cache": self._reset,
            "abort": self._abort,
        }
        try:
            return {"status": "ok", **await calls[body["method"]](body)}
        except Exception as error:
            return {"status": "error", "message": f"{type(error).__name__}: {error}"}

    async def _call(self, body: Any) -> dict[str, Any]:
        arguments = body.get("kwargs") or {}
        return {"results": await self._handler.engine_client.collective_rpc(body["method"], kwargs=arguments)}

    async def _update(self, body: Any) -> dict[str, Any]:
        async with self._handler._pause_lock:
            if not self._handler._paused:
                raise RuntimeError("weights are loaded into a paused worker only: call pause_generation first")
            return await self._call(body)

    async def _reset(self, _: Any) -> dict[str, Any]:
        return {"reset": bool(await self._handler.engine_client.reset_prefix_cache())}

    async def _abort(self, body: Any) -> dict[str, Any]:
        for name in body["request_ids"]:
            self._aborted.add(name)
            try:
                await self._handler.abort_request({"request_id": name})
            finally:
                if name not in self._running:
                    self._aborted.discard(name)
        return {}

    def _keeping_tokens(self, original: Any) -> Any:
        async def generate_tokens(
            prompt: Any, sampling_params: Any, request_id: str, *rest: Any, **more: Any
        ) -> AsyncIterator[dict[str, Any]]:
            self._running.add(request_id)
            try:
                async for part in original(prompt, sampling_params, request_id, *rest, **more):
                    if part.get("finish_reason") == "cancelled" and request_id in self._aborted:
                        part["finish_reason"] = "stop"
                    yield part
            finally:
                self._running.discard(request_id)
                self._aborted.discard(request_id)

        return generate_tokens
