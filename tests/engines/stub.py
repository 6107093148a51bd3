"""A server on 127.0.0.1 that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass
class Reply:
    """`sent` says how much of the body goes out: None is all of it; the announced length stays the whole body's.

    `stream` gives pieces of a body of unknown length, for as long as the client listens; None is a pause.
    """

    body: Any = dataclasses.field(default_factory=dict)
    status: int = 200
    seconds: float = 0.0
    sent: int | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    stream: Callable[[], Iterator[bytes | None]] | None = None

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


Answer = Callable[[Any], Reply]


class Stub:
    """`answers[path]` takes the request's JSON and gives a Reply; several in a list are used one after the other."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Reply | list[Reply]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []  # of the same requests
        self.streamed = 0  # bytes that clients took of streams
        self.url = ""
        self.request = threading.local()  # .headers of the request that the current thread answers
        self.released = threading.Event()  # lets slow answers end when the test does

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def reply(self, path: str, body: Any) -> Reply:
        self.asked.append((path, body))
        answer = self.answers.get(path, Reply({"error": {"message": f"no {path} here"}}, 404))
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else answer[0]
        return answer if isinstance(answer, Reply) else answer(body)


@contextmanager
def serving() -> Iterator[Stub]:
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            stub.headers.append(dict(self.headers))
            stub.request.headers = dict(self.headers)
            reply = stub.reply(self.path.partition("?")[0], json.loads(raw) if raw else None)
            if reply.seconds:
                stub.released.wait(reply.seconds)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.stream is not None:
                self.close_connection = True
                self.end_headers()
                self._stream(reply.stream())
                return
            self.send_header("Content-Length", str(len(reply.raw)))
            self.end_headers()
            self.wfile.write(reply.raw[: reply.sent])
            if reply.sent is not None:
                self.close_connection = True

        def _stream(self, pieces: Iterator[bytes | None]) -> None:
            with suppress(OSError):  # the client has gone
                for piece in pieces:
                    if stub.released.wait(0.02 if piece is None else 0):
                        return
                    self.wfile.write(piece or b"")
                    stub.streamed += len(piece or b"")

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # of the standard 5, those that come too many at a time wait for seconds

        def handle_error(self, *_: object) -> None:
            """A client that has gone is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield stub
    finally:
        stub.released.set()
        server.shutdown()
        server.server_close()


def eventually(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)
