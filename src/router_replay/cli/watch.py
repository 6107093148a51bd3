"""`router-replay watch`: serve the page of runs on loopback while they go on."""

from __future__ import annotations

import argparse
from typing import Any

from router_replay.cli.report import run_of
from router_replay.errors import ConfigError


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser("watch", help="show the page of running runs in a browser; it updates itself")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the output folder of a run, or NAME=FOLDER")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of the page on 127.0.0.1 (default: a free one)"
    )
    parser.add_argument("--title", default="Router Replay: watching", help="the page's heading")
    parser.set_defaults(run=_watch)


def _watch(chosen: argparse.Namespace) -> int:
    from router_replay.report.watch import Server

    if not 0 <= chosen.port < 65536:
        raise ConfigError(f"--port must be between 0 and 65535, got {chosen.port}")
    try:
        with Server([run_of(text) for text in chosen.runs], chosen.port, chosen.title) as server:
            server.watched.refresh()
            print(f"the page: {server.url}  Ctrl-C ends it", flush=True)
            for folder in server.watched.waiting:
                print(f"waiting for {folder} to finish its first step", flush=True)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print()
    return 0
