"""`router-replay train`: train a policy with the settings of a TOML file."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from router_replay.errors import ConfigError

if TYPE_CHECKING:
    from router_replay.rl.config import TrainConfig
    from router_replay.rl.state.checkpoints import Progress


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser("train", help="train a policy: GRPO on an MoE model with replay off, R2 or R3")
    parser.add_argument("config", nargs="?", type=pathlib.Path, help="a TOML file; docs/training.md has every setting")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting; repeatable")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the output")
    parser.add_argument("--dry-run", action="store_true", help="check and print the resolved config, and exit")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Train, or print the resolved config with --dry-run."""
    from router_replay.rl.config import load_config, to_toml
    from router_replay.rl.config.checks import check_config
    from router_replay.rl.processes.ranks import world_size

    config = load_config(chosen.config, chosen.set)
    if chosen.dry_run:
        world = config.cluster.ranks if config.cluster.kind == "ray" else world_size()
        for warning in check_config(config, world):
            print(f"# note: {warning}")
        print(to_toml(config), end="")
        return 0
    progress = _train(config, chosen.resume)
    if os.environ.get("RANK", "0") == "0":
        print(f"{progress.step} steps done; the policy is in {config.output}/checkpoints", flush=True)
    return 0


def _train(config: TrainConfig, resume: bool) -> Progress:
    if config.cluster.kind == "ray":
        try:
            from router_replay.rl.cluster.driver import train_on_ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ConfigError('cluster.kind = "ray" needs Ray: pip install "router-replay[ray]"') from error
        return train_on_ray(config, resume)
    from router_replay.rl.loop.train import train

    return train(config, resume=resume)


def leave(status: int) -> None:
    """End a process of a run of several processes without Python's normal exit, in which gloo's threads may crash.

    Its files are closed at this point.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
