"""Careful HTTP for engines behind a URL.

`Http` repeats what is safe to repeat, a bounded number of times with growing pauses: connecting, a request that the
server turned away unread (429, 503), and any call that changes nothing. Whatever else goes wrong is an EngineError,
and what was half received is dropped.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from router_replay.errors import EngineError

ATTEMPTS = 5
FIRST_PAUSE = 0.1  # seconds; doubles with each attempt
TURNED_AWAY = (429, 503)


class Http:
    """Requests to one server. Made and used on one event loop."""

    def __init__(self, url: str, timeout: float, server: str, advice: str = "Is it running?") -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise EngineError("an engine behind a URL needs aiohttp: pip install aiohttp") from error
        self._aiohttp = aiohttp
        self.url = url.rstrip("/")
        self._server = server
        self._advice = advice
        self._session = aiohttp.ClientSession(
            # A connection of its own for each request: one that is used again may have been closed by the server, which
            # cannot be told from a server that died with the request in hand, and that one must not be sent again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=timeout, connect=30),
        )

    async def request(
        self, method: str, path: str, body: Any = None, *, repeat: bool = False, query: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and whole body, or EngineError. `repeat`: a broken connection may be tried again too."""
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            try:
                async with self._session.request(method, self.url + path, json=body, params=query) as response:
                    answer = await response.read()
                    if response.status not in TURNED_AWAY or last:
                        return response.status, answer
            except (self._aiohttp.ClientConnectorError, self._aiohttp.ConnectionTimeoutError) as error:
                if last:
                    raise EngineError(
                        f"no {self._server} server at {self.url} after {ATTEMPTS} attempts: {error}. {self._advice}"
                    ) from error
            except TimeoutError as error:
                raise EngineError(f"{self.url}{path} did not answer in time: raise timeout=, or look at it") from error
            except (self._aiohttp.ClientError, ConnectionError) as error:
                if last or not repeat:
                    raise EngineError(
                        f"the connection to {self.url}{path} broke before the answer was whole "
                        f"({type(error).__name__}: {error}); nothing of it was used"
                    ) from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    async def expect(
        self, method: str, path: str, body: Any = None, *, repeat: bool = False, query: dict[str, str] | None = None
    ) -> Any:
        """The parsed answer of a call that must succeed."""
        status, answer = await self.request(method, path, body, repeat=repeat, query=query)
        if status != 200:
            raise EngineError(f"{self.url}{path} answered {status}: {message_of(answer)}")
        return parsed(answer, f"{self.url}{path}")

    async def close(self) -> None:
        await self._session.close()


def parsed(answer: bytes, place: str) -> Any:
    """JSON, or EngineError with the beginning of what came. An empty answer is an empty object."""
    if not answer.strip():
        return {}
    try:
        return json.loads(answer)
    except ValueError as error:
        raise EngineError(f"{place} answered something that is not JSON ({error}): {answer[:200]!r}") from error


def message_of(answer: bytes) -> str:
    """The server's own words, without the JSON around them."""
    try:
        value = json.loads(answer)
    except ValueError:
        return answer[:500].decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return str(value)[:500]
