"""`router-replay verify`: judge whether the routes of an engine, or of a file, belong to their tokens."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from router_replay.cli.inspect import add_format
from router_replay.cli.report import check_report, say_page
from router_replay.errors import ConfigError

if TYPE_CHECKING:
    from router_replay.batch import Sample
    from router_replay.verify.run import Progress

FAULTS = ("shift", "layer-offset", "zero", "stale", "permuted-experts", "cast")


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser("verify", help="judge whether an engine's routes belong to its tokens, and why not")
    parser.add_argument("model", help='the trainer\'s model: a Hugging Face folder, or "tiny"')
    parser.add_argument(
        "--engine",
        default="embedded",
        help="embedded (the default), vllm (in this process), the URL of a vLLM server, or sglang=URL or dynamo=URL",
    )
    parser.add_argument("--trajectories", type=pathlib.Path, metavar="FILE", help="verify this file, without an engine")
    add_format(parser, model=False)
    parser.add_argument("--limit", type=int, default=64, metavar="N", help="the sequences of the file to read (64)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of the file, only the trajectories of this training step"
    )
    parser.add_argument("--prompts", type=pathlib.Path, metavar="FILE", help="a prompt in each line, text or JSON")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to sample for each prompt (32)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of the sampling (1.0)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts, injected faults and a local engine's sampling (0)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trainer's passes")
    parser.add_argument("--engine-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of a local engine")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--against", metavar="PATH", help="a checkpoint whose routers may have chosen the rows")
    parser.add_argument("--inject", choices=FAULTS, metavar="FAULT", help=f"put a fault in first: {', '.join(FAULTS)}")
    parser.add_argument("--api-key-env", default="", metavar="NAME", help="the variable that holds a server's key")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="FILE", help="write a page to FILE, and its JSON beside it"
    )
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from router_replay.verify.display import shown
    from router_replay.verify.run import verify

    for name in ("tokens", "limit"):
        if getattr(chosen, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(chosen, name)}")
    check_report(chosen.report)
    with shown() as progress:
        samples, source, temperature = _samples(chosen, progress)
        verdict = verify(
            samples,
            chosen.model,
            source,
            dtype=chosen.dtype,
            device=chosen.device,
            temperature=temperature,
            against=chosen.against,
            fault=chosen.inject,
            seed=chosen.seed,
            progress=progress,
        )
    if chosen.json:
        json.dump(verdict.as_json(), sys.stdout, indent=2)
        print()
    else:
        print("\n".join(verdict.as_text()))
    if chosen.report is not None and verdict.seen is not None:
        from router_replay.report import write_verdict

        write_verdict(verdict.as_json(), verdict.as_text(), verdict.seen, chosen.report)
        say_page(chosen.report)
    return 0 if verdict.belongs else 1


def _samples(chosen: argparse.Namespace, progress: Progress) -> tuple[list[Sample], str, float]:
    """Return the sequences to verify, where they are from, and the temperature of their sampling."""
    from router_replay.rl.policy.models import model_folder
    from router_replay.spec import RouterSpec
    from router_replay.verify.rollouts import LOCAL, generate, open_engine, read_prompts, read_samples

    folder = model_folder(chosen.model)
    injected = f", with the fault {chosen.inject} put in" if chosen.inject else ""
    if chosen.trajectories is not None:
        spec = RouterSpec.from_config(json.loads((folder / "config.json").read_text()))
        samples, temperature = read_samples(chosen.trajectories, chosen.format, spec, chosen.limit, chosen.step)
        return samples, f"{chosen.trajectories}{injected}", temperature
    prompts, where = read_prompts(chosen.prompts, folder, chosen.seed)
    longest = max(len(prompt) for prompt in prompts) + chosen.tokens + 1
    # Servers get no seed: SGLang may refuse it, and a stock vLLM up to 0.30 on a CPU may end because of it.
    seed = chosen.seed if chosen.engine in LOCAL else None
    with open_engine(chosen.engine, folder, chosen.engine_dtype, longest, chosen.api_key_env) as engine:
        tick = progress(f"engine {chosen.engine}", len(prompts))
        samples = generate(engine, prompts, chosen.tokens, chosen.temperature, seed, tick)
    return samples, f"engine {chosen.engine}, {where}{injected}", chosen.temperature
