"""The door of `router-replay serve`: an ASGI middleware of vLLM's server, in front of every route.

vLLM's own --api-key guards /v1 and some others, and leaves /pause, /update_weights and /collective_rpc open. Here all
that comes over the network, websockets among it, must bring the key of the environment variable
ROUTER_REPLAY_API_KEY as `Authorization: Bearer KEY`. Where the server has no key, it answers only what comes in on a
loopback address, and no web page: a page that a user looks at can reach servers on the user's machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "ROUTER_REPLAY_API_KEY"
MIDDLEWARE = "router_replay.engines.vllm.guard.Guard"  # as vLLM's --middleware takes it

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get(KEY, "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # the server's own start and end
            await self._app(scope, receive, send)
            return
        status, reason = self._refusal(scope)
        if not status:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": reason})  # before it is accepted: HTTP 403
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            if status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"error": {"message": reason}}).encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        """The status and the reason; 0 where the request may pass."""
        headers = [(name.lower(), value) for name, value in scope.get("headers", ())]
        if self._key:
            sent = [value for name, value in headers if name == b"authorization"]
            scheme, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
            # Both are looked at in any case: the time that it takes says nothing about the key.
            good = hmac.compare_digest(key.strip(), self._key) & (scheme.lower() == b"bearer")
            return (0, "") if good else (401, "this server asks for its key: Authorization: Bearer KEY")
        if not _came_by_loopback(scope):
            return 403, f"this server has no key ({KEY}), so it answers on loopback addresses only"
        if any(name == b"origin" for name, _ in headers):
            return 403, f"this server has no key ({KEY}), so it does not answer web pages"
        return 0, ""


def _came_by_loopback(scope: Scope) -> bool:
    """By the address that the connection was made to, which no header can change."""
    host, port = scope.get("server") or ("", 0)
    if port is None:  # a Unix socket: the file system says who may use it
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
