"""Controls access to `router-replay serve`, as an ASGI middleware in front of every route of vLLM's server.

vLLM's own --api-key protects /v1 and some other routes, but leaves /pause, /update_weights and /collective_rpc open.
With this middleware every network request, including websockets, must send the key of the environment variable
ROUTER_REPLAY_API_KEY as `Authorization: Bearer KEY`. A server without a key answers only requests to a loopback
address, and none from web pages: a page in a user's browser can reach servers on the user's machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "ROUTER_REPLAY_API_KEY"
MIDDLEWARE = "router_replay.engines.vllm.guard.Guard"  # the value of vLLM's --middleware

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Answers requests that may not pass with HTTP 401 or 403, and gives all others to `app`, vLLM's server."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get(KEY, "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI calls it."""
        if scope["type"] not in ("http", "websocket"):  # startup and shutdown of the server
            await self._app(scope, receive, send)
            return
        status, reason = self._refusal(scope)
        if not status:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": reason})  # before accepting: HTTP 403
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            if status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"error": {"message": reason}}).encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        """Return the status and the reason of a refusal; the status is 0 if the request may pass."""
        headers = [(name.lower(), value) for name, value in scope.get("headers", ())]
        if self._key:
            sent = [value for name, value in headers if name == b"authorization"]
            scheme, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
            # Both are always checked, so that the time taken reveals nothing about the key.
            good = hmac.compare_digest(key.strip(), self._key) & (scheme.lower() == b"bearer")
            return (0, "") if good else (401, "this server requires its key: send the header Authorization: Bearer KEY")
        if not _came_by_loopback(scope):
            return (
                403,
                f"this server was started without a key ({KEY}), so it answers requests to loopback addresses only",
            )
        if any(name == b"origin" for name, _ in headers):
            return 403, f"this server was started without a key ({KEY}), so it does not answer requests from web pages"
        return 0, ""


def _came_by_loopback(scope: Scope) -> bool:
    """Return whether the connection was made to a loopback address, which no header can change."""
    host, port = scope.get("server") or ("", 0)
    if port is None:  # a Unix socket: file permissions control access
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
