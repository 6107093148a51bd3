"""Run the `router-replay` command. A subcommand imports what it needs when it runs, so that --help is fast.

Exit codes: 0 for success, 1 for an error that is printed as one message, 2 for a wrong command line, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from router_replay import __version__
from router_replay.cli import demo, gateway, inspect, make_model, report, train, verify, watch
from router_replay.errors import RouterReplayError

EXTRAS = ("torch", "transformers", "pydantic", "rich", "aiohttp")  # what a bare installation may lack


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `arguments` defaults to those of the process."""
    parser = argparse.ArgumentParser(prog="router-replay", description="Rollout routing replay for MoE models.")
    parser.add_argument("--version", action="version", version=f"router-replay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    families = commands.add_parser("families", help="print which transformers MoE families can be replayed, and how")
    families.set_defaults(run=_families)
    inspect.add(commands)
    serve = commands.add_parser(
        "serve",
        help="start vLLM's own OpenAI server with capture and forced routing",
        allow_abbrev=False,  # vLLM's --api-key KEY must not be read as --api-key-env
    )
    serve.add_argument("model", help="a Hugging Face folder; vLLM's own options may follow")
    serve.add_argument(
        "--api-key-env",
        default="",
        metavar="NAME",
        help="the environment variable that holds the server's key, which every route then asks for (default: "
        "ROUTER_REPLAY_API_KEY, if it is set); without a key the server listens on loopback addresses only",
    )
    serve.set_defaults(run=_serve)
    gateway.add(commands)
    make_model.add(commands)
    train.add(commands)
    demo.add(commands)
    report.add(commands)
    watch.add(commands)
    verify.add(commands)
    chosen, rest = parser.parse_known_args(arguments)
    if rest and chosen.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    chosen.rest = rest
    status = _status(chosen)
    if chosen.command == "train":
        train.leave(status)
    return status


def _status(chosen: argparse.Namespace) -> int:
    """Run the command. Errors of this package and of files are printed as one message, without a traceback."""
    try:
        return int(chosen.run(chosen))
    except KeyboardInterrupt:
        print(f"router-replay {chosen.command}: interrupted", file=sys.stderr)
        return 130
    except (RouterReplayError, OSError) as error:
        if not getattr(error, "printed", False):
            print(f"router-replay {chosen.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        print(f'router-replay {chosen.command} needs {error.name}: pip install "router-replay[train]"', file=sys.stderr)
        return 1


def _families(_: argparse.Namespace) -> int:
    from router_replay.families.table import families_table
    from router_replay.families.versions import summary

    print(families_table())
    print(summary(), file=sys.stderr)
    return 0


def _serve(chosen: argparse.Namespace) -> int:
    from router_replay.engines.vllm.serve import serve

    return serve(chosen.model, chosen.rest, chosen.api_key_env)
