"""`router-replay demo`: compare replay off with R3 on the tiny model with a real vLLM engine."""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser("demo", help="compare replay off with R3 on a tiny model with a real vLLM engine")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/demo"), help="folder for runs and page")
    parser.add_argument("--steps", type=int, default=25, help="training steps of each run")
    parser.add_argument("--fp8", action="store_true", help="round the engine's weights to FP8 blocks")
    parser.add_argument("--float32-routers", action="store_true", help="compute the engine's routers in float32 too")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Run the demo and print its table and findings."""
    from router_replay.recipes.tiny.demo import run_demo
    from router_replay.report import as_text

    started = time.perf_counter()
    rows, notes = run_demo(chosen.out, chosen.steps, chosen.fp8, chosen.float32_routers)
    took = f"Both runs took {(time.perf_counter() - started) / 60:.1f} minutes."
    print("", as_text(rows), "", *notes, took, "", f"The curves: {chosen.out / 'report.html'}", sep="\n")
    return 0
