"""The HTTP side of the gateway, on aiohttp: routes, keys, streams.

    with GatewayServer(gateway) as server:                # in a thread of its own
        OpenAI(base_url=f"{server.url}/sessions/game-7/v1", api_key="none")

Without a key the server listens on a loopback address only, and answers no web page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from router_replay.engines.http import authorization
from router_replay.engines.vllm.serve import is_loopback
from router_replay.errors import EngineError, RouterReplayError
from router_replay.gateway.export import write_session
from router_replay.gateway.fields import Ask, read_chat, read_text
from router_replay.gateway.gateway import Answer, Gateway
from router_replay.gateway.refusal import Refusal
from router_replay.gateway.replies import Reply
from router_replay.gateway.sessions import Session

try:
    from aiohttp import web
except ImportError as error:
    raise EngineError('the gateway needs aiohttp: pip install "router-replay[http]"') from error

logger = logging.getLogger(__name__)
SESSION_HEADER = "X-Session-Id"
BODY_LIMIT = 32 << 20  # bytes of a request
HEARTBEAT = 10.0  # seconds between two comments in a stream that waits for its answer
T = TypeVar("T")


class GatewayServer:
    """Serves a `gateway` on `host` and `port` (0: any free one), in a thread of its own.

    `api_key` opens everything; it is required unless `host` is a loopback address.
    """

    def __init__(self, gateway: Gateway, host: str = "127.0.0.1", port: int = 0, *, api_key: str | None = None) -> None:
        authorization(api_key)  # refuses a key that no client could send
        if api_key is None and not is_loopback(host):
            raise EngineError(
                f"--host {host} needs a key, because everyone who can reach the gateway can read and delete sessions. "
                "Put a key into an environment variable and name that by --api-key-env, or leave --host out (127.0.0.1)"
            )
        self.gateway = gateway
        self._host, self._port, self._key = host, port, None if api_key is None else api_key.encode()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="router-replay-gateway", daemon=True)
        self._runner: web.AppRunner | None = None

    # -- start and end ------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start to listen. Raises OSError if the port is taken."""
        self._thread.start()
        try:
            self.call(self._start())
        except BaseException:
            self.close()
            raise
        return self

    @property
    def url(self) -> str:
        """The address without a path, such as http://127.0.0.1:8080."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def call(self, work: Awaitable[T]) -> T:
        """Run `work` on the server's event loop, from another thread, and return its result."""

        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def soon(self, work: Callable[[], object]) -> None:
        """Call `work` on the server's event loop, from another thread, without waiting; not if the server is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """End all connections and the thread. The engine stays open."""
        if self._thread.is_alive():
            if self._runner is not None:
                self.call(self._runner.cleanup())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._answering], client_max_size=BODY_LIMIT)
        for prefix in ("/v1", "/sessions/{name}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._text)
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_post("/sessions", self._open)
        app.router.add_get("/sessions", self._list)
        app.router.add_get("/sessions/{name}", self._read)
        app.router.add_delete("/sessions/{name}", self._delete)
        app.router.add_post("/weights", self._weights)
        app.router.add_get("/health", self._health)
        # Cancelled when the client leaves, so that the engine does not sample for nobody.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    # -- every request ------------------------------------------------------------------------------

    @web.middleware
    async def _answering(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        try:
            self._refuse_strangers(request)
            return await handler(request)
        except Refusal as refusal:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
            return web.json_response(refusal.body(), status=refusal.status, headers=headers)
        except RouterReplayError as error:
            return web.json_response(Refusal(502, str(error)).body(), status=502)
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}"
            return web.json_response(Refusal(error.status, text).body(), status=error.status)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            text = "the gateway failed; its log says why"
            return web.json_response(Refusal(500, text).body(), status=500)

    def _refuse_strangers(self, request: web.Request) -> None:
        sent = request.headers.getall("Authorization", [])
        scheme, _, key = (sent[0] if len(sent) == 1 else "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        name = request.match_info.get("name")
        session = None if name is None else self.gateway.sessions.find(name)
        if session is not None and "/v1/" in request.path and session.opened_by(given):
            return
        if self._key is not None:
            if not hmac.compare_digest(given, self._key):
                raise Refusal(
                    401, "this gateway requires its key: send Authorization: Bearer KEY", code="invalid_api_key"
                )
            return
        if not _came_by_loopback(request):
            raise Refusal(403, "this gateway was started without a key, so it answers loopback addresses only")
        if "Origin" in request.headers:
            raise Refusal(403, "this gateway was started without a key, so it does not answer requests from web pages")

    # -- the routes of agents -----------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_chat(await _json(request)))

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_text(await _json(request)))

    async def _answer(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        session = self._session(request, ask)
        session.users += 1
        try:
            return await self._answered(request, ask, session)
        finally:
            session.users -= 1
            self.gateway.sessions.forget_if_empty(session)

    async def _answered(self, request: web.Request, ask: Ask, session: Session) -> web.StreamResponse:
        plan, headers = self.gateway.plan(session, ask), {SESSION_HEADER: session.name}
        if not ask.stream:
            answer = await self.gateway.run(plan)
            return web.json_response(Reply(ask, answer, self.gateway.model).whole(), headers=headers)
        working = asyncio.ensure_future(self.gateway.run(plan))
        try:
            return await self._stream(request, ask, working, headers)
        finally:
            working.cancel()

    async def _stream(
        self, request: web.Request, ask: Ask, working: asyncio.Future[Answer], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Send the pieces of an answer when it is complete, and comments until then. Engines return whole turns."""
        await asyncio.sleep(0)  # a request that is refused at once gets its own status
        if working.done():
            working.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        while not working.done():
            await asyncio.wait([working], timeout=HEARTBEAT)
            if not working.done():
                await response.write(b": waiting for the engine\n\n")
        try:
            for chunk in Reply(ask, working.result(), self.gateway.model).chunks():
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (Refusal, RouterReplayError) as error:  # the status 200 is sent: clients read the error from the stream
            refusal = error if isinstance(error, Refusal) else Refusal(502, str(error))
            await response.write(b"data: " + json.dumps(refusal.body()).encode() + b"\n\n")
        await response.write_eof()
        return response

    def _session(self, request: web.Request, ask: Ask) -> Session:
        name = request.match_info.get("name") or request.headers.get(SESSION_HEADER) or ask.user
        if not name:
            raise Refusal(
                400,
                f"name a session: use the base URL {self.url}/sessions/NAME/v1, or send the header {SESSION_HEADER} or "
                "the field user",
                param="user",
                code="session_missing",
            )
        return self.gateway.sessions.get_or_open(name)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.gateway.model, "object": "model", "created": 0, "owned_by": "router-replay"}
        return web.json_response({"object": "list", "data": [model]})

    # -- the routes of trainers ---------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.Response:
        body = await _json(request) if request.can_read_body else {}
        if not isinstance(body, dict) or set(body) - {"id"}:
            raise Refusal(400, 'the body must be empty, or {"id": NAME}', param="id")
        key = secrets.token_urlsafe(24)
        session = self.gateway.sessions.open(body.get("id"), key)
        url = f"{self.url}/sessions/{session.name}/v1"
        return web.json_response({"id": session.name, "api_key": key, "base_url": url}, status=201)

    async def _list(self, _: web.Request) -> web.Response:
        sessions = self.gateway.sessions
        found = [session.summary() for session in sessions.all()]
        totals = {"bytes": sessions.bytes, "max_bytes": sessions.max_bytes, "evicted": sessions.evicted}
        return web.json_response({"sessions": found, **totals})

    async def _read(self, request: web.Request) -> web.Response:
        session = self.gateway.sessions.get(request.match_info["name"])
        response = web.json_response(write_session(session))
        session.was_read = True
        return response

    async def _delete(self, request: web.Request) -> web.Response:
        return web.json_response(self.gateway.sessions.remove(request.match_info["name"]).summary())

    async def _weights(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict) or set(body) != {"folder", "version"}:
            raise Refusal(400, 'the body must be {"folder": a Hugging Face folder, "version": a number}')
        await asyncio.to_thread(self.gateway.engine.update_weights, body["folder"], body["version"])
        return web.json_response({"version": self.gateway.engine.version})

    async def _health(self, _: web.Request) -> web.Response:
        await asyncio.to_thread(self.gateway.engine.ping)
        return web.json_response({"version": self.gateway.engine.version})


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None


def _came_by_loopback(request: web.Request) -> bool:
    """Return whether the connection was made to a loopback address, which no header can change."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        address = ipaddress.ip_address(request.transport.get_extra_info("sockname")[0])
        return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)
    return False
