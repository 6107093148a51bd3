"""`router-replay report`: compare runs, as a table in the terminal and as an HTML page."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router_replay.report import Run


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command with argparse's subparsers."""
    report = commands.add_parser("report", help="compare training runs in a table and on a page of curves")
    report.add_argument("runs", nargs="+", metavar="RUN", help="the output folder of a run, or NAME=FOLDER")
    report.add_argument("--out", type=pathlib.Path, default=pathlib.Path("report.html"), help="the page's file")
    report.add_argument("--title", default="Router Replay: runs compared", help="the page's heading")
    report.set_defaults(run=_report)


def _report(chosen: argparse.Namespace) -> int:
    from router_replay.report import as_text, comparison, write_report

    runs = [run_of(text) for text in chosen.runs]
    write_report(runs, chosen.out, chosen.title)
    print(as_text(comparison(runs)))
    print(f"\npage: {chosen.out}  numbers: {chosen.out.with_suffix('.json')}")
    return 0


def check_report(out: pathlib.Path | None) -> None:
    """Raise ConfigError if no page can be written to `out`, before the work that the page is about."""
    if out is not None:
        from router_replay.report.library import check_library
        from router_replay.report.page import check_name

        check_name(out)
        check_library()


def say_page(out: pathlib.Path) -> None:
    """Say where the page `out` and its JSON are, on stderr, since stdout may be JSON."""
    print(f"page: {out}  data: {out.with_suffix('.json')}", file=sys.stderr)


def run_of(text: str) -> Run:
    """Return the run that an argument FOLDER or NAME=FOLDER names."""
    from router_replay.report import Run

    name, equals, folder = text.partition("=")
    if equals and not pathlib.Path(text).exists():
        return Run(name, pathlib.Path(folder))
    path = pathlib.Path(text)
    return Run(path.resolve().name, path)
