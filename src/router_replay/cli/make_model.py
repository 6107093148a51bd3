"""`router-replay make-model`: make the tiny Qwen3-MoE of the demo, or a larger one for a GPU."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser("make-model", help="make a small Qwen3-MoE that was trained on additions")
    parser.add_argument("--size", choices=("tiny", "gpu"), default="tiny", help="tiny: 11 MB; gpu: 0.9 GB")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="default: models/SIZE")
    parser.add_argument("--steps", type=int, metavar="N", help="maximum; training stops earlier at its target accuracy")
    parser.add_argument("--digits", type=int, metavar="N", help="number of digits of the operands")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the weights and the examples")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU if there is one)")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from router_replay.recipes.tiny.display import shown
    from router_replay.recipes.tiny.model import read_stamp
    from router_replay.recipes.tiny.warm_start import make_model

    folder = chosen.out or pathlib.Path("models") / chosen.size
    try:
        with shown(f"making {folder.name}") as progress:
            make_model(
                folder,
                chosen.size,
                steps=chosen.steps,
                digits=chosen.digits,
                seed=chosen.seed,
                device=chosen.device,
                progress=progress,
            )
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue from the last saved state", file=sys.stderr)
        return 130
    stamp = read_stamp(folder) or {}
    print(
        f"{folder}: {stamp['steps_done']} steps; at temperature 1, {stamp['additions_right']:.0%} of additions and "
        f"{stamp['calculations_right']:.0%} of calculator episodes right"
    )
    return 0
