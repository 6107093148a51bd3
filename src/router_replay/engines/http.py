"""Sends HTTP requests to engine servers, which are not trusted.

`Http` retries what is safe to retry, a bounded number of times with growing pauses: connecting, a request that the
server rejected unread (429, 503), and any call that changes nothing. Every other failure raises EngineError, and
partially received answers are discarded.

Every answer is limited in bytes and in seconds. Redirects are not followed, because they would send prompts to another
host. Compressed bodies are refused, because they can expand without limit.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from router_replay.engines import checks
from router_replay.engines.types import Request
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

ATTEMPTS = 5
FIRST_PAUSE = 0.1  # seconds; doubles with each attempt
TURNED_AWAY = (429, 503)  # the server is busy and did not read the request
CONTROL_SECONDS = 30.0  # for calls that a server answers at once; the caller's timeout= if that is less
CONTROL_LIMIT = 4 << 20  # bytes of an answer that holds settings or a status
CHUNK = 1 << 16

T = TypeVar("T")
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=checks.TOKEN_LIMIT)]
"""The type of a token id in answers: a value out of range is refused, and the error says where it is."""


class Http:
    """Sends requests to one server. It must be created and used on one event loop.

    `timeout` applies to calls that may take long (`patient=True`); all others have CONTROL_SECONDS.
    """

    def __init__(
        self, url: str, timeout: float, server: str, advice: str = "Is it running?", *, api_key: str | None = None
    ) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise EngineError("connecting to an engine by URL needs aiohttp: pip install aiohttp") from error
        self._aiohttp = aiohttp
        self.url = checked_url(url)
        self._server = server
        self._advice = advice
        self.timeout = checks.seconds(timeout, "timeout")
        self._session = aiohttp.ClientSession(
            # Each request gets a new connection. A reused one may have been closed by the server, which looks the same
            # as a server that died while handling the request, and such a request must not be sent again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Accept-Encoding": "identity", **authorization(api_key)},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        repeat: bool = False,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        retry_if: Callable[[], bool] = lambda: True,
        patient: bool = False,
        limit: int = CONTROL_LIMIT,
    ) -> tuple[int, bytes]:
        """Send a request and return the status and the whole body. Raises EngineError if that fails.

        `retry_if` decides whether a request that the server turned away is sent again. `repeat` also allows a retry
        after a broken connection. `patient` allows the server to take a long time. `limit` is the largest accepted
        body in bytes.
        """
        seconds = self.timeout if patient else min(self.timeout, CONTROL_SECONDS)
        timeout = self._aiohttp.ClientTimeout(total=seconds, connect=CONTROL_SECONDS)
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            try:
                async with self._session.request(
                    method,
                    self.url + path,
                    json=body,
                    params=query,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                ) as response:
                    answer = await self._body(response, path, limit)
                    if response.status not in TURNED_AWAY or last or not retry_if():
                        return response.status, answer
            except (self._aiohttp.ClientConnectorError, self._aiohttp.ConnectionTimeoutError) as error:
                if last:
                    raise EngineError(
                        f"no {self._server} server at {self.url} after {ATTEMPTS} attempts: {error}. {self._advice}"
                    ) from error
            except TimeoutError as error:
                raise EngineError(
                    f"{self.url}{path} did not answer in time ({seconds:g} seconds): check the server"
                    + (", or increase timeout=" if patient else "")
                ) from error
            except (self._aiohttp.ClientError, ConnectionError) as error:
                if last or not repeat:
                    raise EngineError(
                        f"the connection to {self.url}{path} broke before the answer was complete "
                        f"({type(error).__name__}: {error}); the partial answer was discarded"
                    ) from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    async def _body(self, response: Any, path: str, limit: int) -> bytes:
        """Read the body in pieces, and stop at the limit."""
        place = f"{self.url}{path}"
        if 300 <= response.status < 400:
            raise EngineError(
                f"{place} answered {response.status}, a redirect to {_host(response.headers.get('Location', ''))}: "
                "redirects are not followed, because they would send prompts to another address. Give the URL of the "
                "server itself"
            )
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise EngineError(
                f"{place} sent a body with Content-Encoding {encoding!r}, expected an uncompressed body: turn "
                "compression off in the server, or in the proxy in front of it"
            )
        parts = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK):
            parts += chunk
            if len(parts) > limit:
                raise EngineError(
                    f"{place} sent more than the {limit} bytes that a valid answer can have; it was discarded"
                )
        return bytes(parts)

    async def expect(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Return the parsed answer of a call that must succeed. The options are those of `request`."""
        status, answer = await self.request(method, path, body, **options)
        if status != 200:
            raise refusal(f"{self.url}{path}", status, answer)
        return parsed(answer, f"{self.url}{path}")

    async def expect_object(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Call `expect` and return its answer, which must be a JSON object."""
        answer = await self.expect(method, path, body, **options)
        if not isinstance(answer, dict):
            raise EngineError(f"{self.url}{path}: expected a JSON object, got {str(answer)[:200]}")
        return answer

    async def ping(self) -> None:
        """Raise EngineError unless the server says that it is well."""
        status, answer = await self.request("GET", "/health", repeat=True)
        if status != 200:
            raise refusal(f"{self.url}/health", status, answer)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def answer_limit(request: Request, spec: RouterSpec, samples: int) -> int:
    """Return the size limit of an answer: twice the most bytes that a valid answer with this many samples can have.

    The size covers the rows of every decoder layer as base64 of 4-byte numbers, the JSON of each sampled token (its
    log-prob, text and bytes), a few bytes for each prompt token if the server repeats it, and a fixed part.
    """
    prompt, sampled = len(request.token_ids), request.sampling.max_tokens
    row = spec.engine_layers * spec.top_k * 4 * 4 // 3
    return 2 * ((1 << 20) + samples * ((prompt + sampled) * (row + 64) + sampled * 2048))


def checked_url(url: Any) -> str:
    """Return a server's URL without a trailing slash. A URL with a password is refused, and never shown."""
    if not isinstance(url, str):
        raise EngineError(f"the URL of a server must be a string such as http://HOST:PORT, got {type(url).__name__}")
    if "@" in url:  # not parsed, because a slash in a password would split the URL in the wrong place
        raise EngineError(
            f"the URL of a server must not contain a user name or password (before @{url.rpartition('@')[2]}): write "
            "http://HOST:PORT, and pass the key as api_key=, or in a config name the environment variable that holds "
            "the key as engine.api_key_env"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isprintable() or " " in url:
        raise EngineError(f"the URL of a server must be http://HOST:PORT or https://HOST:PORT, got {url[:200]!r}")
    if parts.query or parts.fragment:
        raise EngineError(
            "the URL of a server must have neither a query nor a fragment: write "
            f"{parts.scheme}://{parts.netloc}{parts.path}"
        )
    return url.rstrip("/")


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the HTTP header for an API key. An invalid key is not shown in the error."""
    if api_key is None:
        return {}
    if not isinstance(api_key, str) or not api_key or not (api_key.isascii() and api_key.isprintable()):
        raise EngineError("api_key must be a non-empty string of printable ASCII characters (it is not shown here)")
    if " " in api_key:
        raise EngineError("api_key must not contain a space (it is not shown here)")
    return {"Authorization": f"Bearer {api_key}"}


def decoded(body: bytes, kind: type[T], place: str) -> T:
    """Decode an answer as type `kind`. Raises EngineError that says where the answer differs."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{place} is not the expected JSON: {error}") from error
    except RecursionError as error:
        raise EngineError(f"{place} is not the expected JSON: it is nested too deeply") from error


def parsed(answer: bytes | str, place: str) -> Any:
    """Parse JSON; an empty answer gives an empty object. Raises EngineError that quotes the start of the answer."""
    if not answer.strip():
        return {}
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{place}: expected JSON, got {answer[:200]!r} ({type(error).__name__}: {error})") from error


def refusal(place: str, status: int, answer: bytes) -> EngineError:
    """Return the error for an answer whose status is not 200."""
    advice = ""
    if status in (401, 403):
        advice = (
            ". Pass the server's key as api_key= (engine.api_key_env in a config, --api-key-env for router-replay "
            "verify, --engine-key-env for router-replay gateway)"
        )
    return EngineError(f"{place} answered {status}: {message_of(answer)}{advice}")


def message_of(answer: bytes) -> str:
    """Return the server's error message without the surrounding JSON."""
    try:
        value = json.loads(answer)
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(key):
                value = value[key]
        return str(value)[:500]
    except (ValueError, RecursionError):
        return answer[:500].decode("utf-8", "replace")


def printable(text: str) -> str:
    """Make a server's text safe to print on a terminal by replacing its control characters with "?"."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def _host(location: str) -> str:
    """Return the host of a redirect; the rest of the URL may contain secrets."""
    try:
        return urllib.parse.urlsplit(location).hostname or "another path of the same host"
    except ValueError:
        return "an address that cannot be read"
