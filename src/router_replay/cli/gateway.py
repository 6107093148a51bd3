"""`router-replay gateway`: OpenAI's chat and completions routes in front of an engine, for agents."""

from __future__ import annotations

import argparse
import os
import threading
from typing import TYPE_CHECKING, Any

from router_replay.errors import EngineError

if TYPE_CHECKING:
    from router_replay.engines.base import Engine

KEY = "ROUTER_REPLAY_API_KEY"
EMBEDDED = "embedded"
# The options with their argparse settings, in the order of --help.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "--engine": ({"required": True}, f'the URL of a server, or "{EMBEDDED}" to run the model in this process'),
    "--kind": ({"choices": ("vllm", "sglang", "dynamo"), "default": "vllm"}, "what serves the URL (default: vllm)"),
    "--model": (
        {"metavar": "FOLDER"},
        "the Hugging Face folder of the model, for its tokenizer, chat template and routers (default: the folder that "
        "the server names, if this machine has it)",
    ),
    "--host": ({"default": "127.0.0.1"}, "the address to listen on; one that is not a loopback address needs a key"),
    "--port": ({"type": int, "default": 8080}, "the port to listen on (default: 8080); 0 for any free one"),
    "--api-key-env": (
        {"metavar": "NAME", "default": ""},
        f"the environment variable that holds the gateway's key (default: {KEY}, if it is set)",
    ),
    "--engine-key-env": (
        {"metavar": "NAME", "default": ""},
        "the environment variable that holds the key of the engine's server",
    ),
    "--max-length": (
        {"type": int, "metavar": "N"},
        "the most tokens of prompt and answer together (default: the model's own limit)",
    ),
    "--max-tokens": ({"type": int, "metavar": "N"}, "the most tokens of an answer, where the agent gives no limit"),
    "--max-turns": ({"type": int, "metavar": "N"}, "the most requests of a session"),
    "--max-bytes": (
        {"type": int, "metavar": "N", "default": 4 << 30},
        "the most bytes of all sessions together (default: 4 GiB)",
    ),
    "--temperature": ({"type": float, "metavar": "T"}, "use this temperature, whatever an agent asks"),
    "--top-p": ({"type": float, "metavar": "P"}, "use this top_p, whatever an agent asks"),
    "--policy-version": (
        {"type": int, "metavar": "N", "default": 0},
        "the policy version of the weights that the engine has now (default: 0)",
    ),
}


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser(
        "gateway",
        help="serve agents by OpenAI's routes, and keep the tokens, log-probs and routes of their sessions",
        description="An OpenAI-compatible endpoint in front of an engine. Agents use the base URL "
        "http://HOST:PORT/sessions/NAME/v1; a trainer reads GET /sessions/NAME. docs/gateway.md explains it.",
    )
    for name, (settings, text) in OPTIONS.items():
        parser.add_argument(name, help=text, **settings)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from transformers import AutoConfig, AutoTokenizer

    from router_replay.gateway import Gateway, GatewayServer
    from router_replay.gateway.chat import end_token_ids
    from router_replay.gateway.served import served_folder

    key = _key(chosen.api_key_env, "--api-key-env") or os.environ.get(KEY) or None
    engine_key = _key(chosen.engine_key_env, "--engine-key-env")
    if chosen.engine == EMBEDDED and not chosen.model:
        raise EngineError(f"--engine {EMBEDDED} needs the model's folder: give it with --model")
    folder = chosen.model or served_folder(chosen.engine, chosen.kind, engine_key)
    try:
        config, tokenizer = (kind.from_pretrained(folder) for kind in (AutoConfig, AutoTokenizer))
    except (OSError, ValueError) as error:
        raise EngineError(f"the config and the tokenizer of {folder} cannot be read: {error}") from error
    longest = chosen.max_length or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not longest:
        raise EngineError(f"the config of {folder} has no max_position_embeddings: give --max-length")
    with _engine(chosen, folder, config, engine_key) as engine:
        gateway = Gateway(
            engine,
            tokenizer,
            max_length=longest,
            max_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            max_turns=chosen.max_turns,
            end_token_ids=end_token_ids(folder),
            model=os.path.basename(os.path.abspath(folder)),
            max_bytes=chosen.max_bytes,
        )
        with GatewayServer(gateway, chosen.host, chosen.port, api_key=key) as server:
            print(f"agents: base_url = {server.url}/sessions/NAME/v1", flush=True)
            print(f"trainers: GET {server.url}/sessions/NAME", flush=True)
            if not engine.capabilities.routes:
                print(f"no routes will be kept: {engine.capabilities.why_not}", flush=True)
            threading.Event().wait()
    return 0


def _engine(chosen: argparse.Namespace, folder: str, config: Any, key: str | None) -> Engine:
    """Connect to the engine, or start the embedded one."""
    from router_replay import RouterSpec, engines
    from router_replay.engines.checks import vocabulary_of

    version = chosen.policy_version
    if chosen.engine == EMBEDDED:
        return engines.EmbeddedEngine(folder, version=version, max_length=chosen.max_length, dtype="auto")
    spec, vocabulary = RouterSpec.from_config(config), vocabulary_of(config.to_dict())
    if chosen.kind == "vllm":
        return engines.VllmHttpEngine(chosen.engine, spec=spec, version=version, api_key=key, vocabulary=vocabulary)
    kind = engines.SglangEngine if chosen.kind == "sglang" else engines.DynamoEngine
    return kind(chosen.engine, spec, version=version, api_key=key, vocabulary=vocabulary)


def _key(name: str, option: str) -> str | None:
    if name and not os.environ.get(name):
        raise EngineError(f"{option} {name}: this environment variable is not set or empty: set it to the key")
    return os.environ[name] if name else None
