"""Serve the page of runs on loopback while they go on. The page asks for news every second.

    with Server([Run("r3", Path("out/run"))], port=0) as server:
        server.url                      # http://127.0.0.1:43210/
        server.serve_forever()

The metrics files are read incrementally. A page costs time in proportion to the steps, so it is made anew only if there
are new steps, and at most a tenth of the time goes into it.
"""

from __future__ import annotations

import html
import http.server
import json
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from router_replay.errors import MeasureError, RouterReplayError
from router_replay.report.library import check_library
from router_replay.report.page import page
from router_replay.report.run_page import RunPage
from router_replay.report.runs import Run
from router_replay.run_files import CONFIG_FILE, LOCK_FILE, METRICS_FILE, MetricsTail

PAUSE = 10.0
"""After a page was made, this many times its own time passes before the next one is made."""


def check_folder(folder: pathlib.Path) -> None:
    """Raise MeasureError if `folder` cannot be the output of a run, with what to do."""
    if not folder.is_dir():
        raise MeasureError(f"there is no folder {folder}: start the run first, or give its `output` folder")
    inside = {path.name for path in folder.iterdir()}
    if not inside or inside & {METRICS_FILE, CONFIG_FILE, LOCK_FILE}:
        return
    runs = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
    hint = f"; it holds the runs {', '.join(runs)}: give their folders" if runs else ""
    raise MeasureError(f"{folder} is not the `output` folder of a training run: it has no {METRICS_FILE}{hint}")


class Watched:
    """Keep the newest page of `runs`, with the heading `title`. `message` says what the page shows."""

    def __init__(self, runs: Sequence[Run], title: str) -> None:
        self._tails = [(run.name, MetricsTail(run.folder)) for run in runs]
        self._title = title
        self._lock = threading.Lock()
        self._made: RunPage | None = None
        self._news, self._number, self._next = False, 0, 0.0
        self.message = ""

    @property
    def waiting(self) -> list[pathlib.Path]:
        """The folders of runs that have not written a step yet."""
        return [tail.folder for _, tail in self._tails if not tail.lines]

    def refresh(self) -> None:
        """Read what the runs have written since the last call, and make the page anew if it is time."""
        with self._lock:
            try:
                for _, tail in self._tails:
                    self._news |= tail.read()
            except (RouterReplayError, OSError) as error:
                self.message = f"The run cannot be read: {error}"
                return
            self.message = self._in_words()
            if self._news and time.monotonic() >= self._next:
                began = time.monotonic()
                runs = [Run.with_lines(name, tail.folder, tail.lines) for name, tail in self._tails if tail.lines]
                self._made = RunPage.of(runs, self._title) if runs else None
                self._news, self._number = False, self._number + 1
                self._next = time.monotonic() + PAUSE * (time.monotonic() - began)

    def _in_words(self) -> str:
        said = []
        for name, tail in self._tails:
            last = f"step {tail.lines[-1]['step']:,}" if tail.lines else f"waiting for its first step in {tail.folder}"
            said.append(f"{name}: {last}")
        return "Watching. " + "; ".join(said) + "."

    def as_html(self) -> str:
        """Return the page as it is now."""
        self.refresh()
        with self._lock:
            if self._made is not None:
                self._made.data["have"] = self._number
                return self._made.as_html(live=self.message)
            said = f'<p id="live" role="status">{html.escape(self.message)}</p><div id="summary"></div>'
            return page(self._title, said, {"runs": [], "charts": [], "have": 0}, live=True)

    def since(self, have: int) -> dict[str, Any]:
        """Return what a page of the number `have` needs to be the newest: only a message if it is."""
        self.refresh()
        with self._lock:
            news: dict[str, Any] = {"have": self._number, "message": self.message}
            if self._made is None or have == self._number:
                return news
            data = {name: value for name, value in self._made.data.items() if name != "have"}
            return {**news, "summary": self._made.summary, "data": data}


class Server(http.server.ThreadingHTTPServer):
    """Serve the page of `runs` with the heading `title` on 127.0.0.1 at `port`; 0 takes a free one.

    Raises MeasureError for a wrong folder, ConfigError without the plotting library, and OSError for a port in use.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Run], port: int = 0, title: str = "Router Replay: watching") -> None:
        for run in runs:
            check_folder(run.folder)
        check_library()
        self.watched = Watched(runs, title)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # A page of another site can reach this port under a name of its own (DNS rebinding): only ours are answered.
        names = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        if self.headers.get("Host", "") not in names:
            return self._answer(403, "text/plain", "this server answers on 127.0.0.1 only\n")
        asked = urllib.parse.urlsplit(self.path)
        if asked.path == "/":
            return self._answer(200, "text/html", self.server.watched.as_html())
        if asked.path == "/state":
            have = urllib.parse.parse_qs(asked.query).get("have", ["0"])[0]
            news = self.server.watched.since(int(have) if have.isdecimal() else 0)
            return self._answer(200, "application/json", json.dumps(news, allow_nan=False))
        return self._answer(404, "text/plain", "there is only the page at /\n")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the page asks every second."""
