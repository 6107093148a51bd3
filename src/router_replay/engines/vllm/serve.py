"""Implements `router-replay serve MODEL`: vLLM's own OpenAI server, with the flags and plugin that routes need.

    router-replay serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 --port 8000
    router-replay serve Qwen/Qwen3-30B-A3B --host 0.0.0.0 --api-key-env SERVER_KEY

Arguments after the model are passed to vLLM last, so they override ours. The server runs in vLLM's development mode,
because only that mode has pausing, weight updates and the plugin's report. It lets anyone who can reach the port do
these things. So every route requires the key, if there is one, and without a key the server listens on loopback
addresses only (guard.py).
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from router_replay.engines.http import authorization
from router_replay.engines.vllm import guard, plugin
from router_replay.engines.vllm.versions import installed_version, model_runner, numbers_of, refuse_version
from router_replay.errors import EngineError

# The `vllm` command looks for a distribution of that name and fails with the CPU build; the module does not.
MODULE = "vllm.entrypoints.openai.api_server"


def serve(model: str, arguments: Sequence[str] = (), api_key_env: str = "") -> int:
    """Run the server until it exits, and return its exit status.

    `arguments` are passed to vLLM. `api_key_env` is the name of the environment variable that holds the key.
    """
    command, environment = server_command(model, arguments, api_key_env)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 130


def server_command(
    model: str, arguments: Sequence[str] = (), api_key_env: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of the server."""
    version = installed_version()
    refuse_version(version)
    key = _key(os.environ, api_key_env)
    _refuse_open_doors(arguments, key)
    command = [sys.executable, "-m", MODULE, "--model", str(model), "--host", "127.0.0.1"]
    command += ["--middleware", guard.MIDDLEWARE]
    command += ["--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs"]
    if numbers_of(version) >= (0, 30):
        command.append("--enable-scale-out")  # /inference/v1/generate, which older versions always have
    if not _has_tokenizer(model):
        command.append("--skip-tokenizer-init")
    environment = {**os.environ, **plugin_environment(os.environ, version)}
    environment.pop("VLLM_API_KEY", None)  # vLLM would check it on some routes; our middleware checks all routes
    if key:
        environment[guard.KEY] = key
    if environment[plugin.ENVIRONMENT] != "0":
        command += ["--weight-transfer-config", json.dumps({"backend": plugin.BACKEND})]
    return command + list(arguments), environment


def _key(now: Mapping[str, str], api_key_env: str) -> str:
    """Return the key from the named variable, or else from ours or vLLM's; empty if there is none."""
    if api_key_env and not now.get(api_key_env):
        raise EngineError(
            f"--api-key-env {api_key_env}: this environment variable is not set or empty: set it to the key"
        )
    key = now.get(api_key_env) or now.get(guard.KEY) or now.get("VLLM_API_KEY") or ""
    if key:
        authorization(key)  # refuses a key that no client could send
    return key


def _refuse_open_doors(arguments: Sequence[str], key: str) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", nargs="?")
    parser.add_argument("--api-key", "--api_key", nargs="?", const="")
    parser.add_argument("--grpc", action="store_true")
    try:
        given, _ = parser.parse_known_args(list(arguments))
    except SystemExit as error:  # raised by argparse for invalid arguments
        raise EngineError("the arguments after the model could not be parsed; the line above says why") from error
    if given.api_key is not None:
        raise EngineError(
            "--api-key is refused: every user can read it in the list of processes, and vLLM does not check it for "
            "/pause and /update_weights. Put the key into an environment variable, and name that by --api-key-env"
        )
    if given.grpc:
        raise EngineError(
            "--grpc is refused: the key of this server protects HTTP only, and gRPC would bypass it. Leave --grpc out"
        )
    if given.host is not None and not key and not is_loopback(given.host):
        raise EngineError(
            f"--host {given.host} needs a key, because everyone who can reach this server can pause it and load "
            "weights into it. Put a key into an environment variable and name that by --api-key-env, or leave --host "
            "out (127.0.0.1)"
        )


def is_loopback(host: str) -> bool:
    """Return whether a server on this host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def plugin_environment(now: Mapping[str, str], version: str) -> dict[str, str]:
    """Return the variables that enable the plugin and development mode, for a server started from environment `now`.

    `version` is the version of vLLM that will run.
    """
    wanted = {
        plugin.ENVIRONMENT: now.get(plugin.ENVIRONMENT) or plugin.REQUIRED,
        "VLLM_SERVER_DEV_MODE": "1",
        **model_runner(version),
    }
    allowed = now.get("VLLM_PLUGINS")
    if allowed is not None and "router_replay" not in allowed.split(","):
        wanted["VLLM_PLUGINS"] = f"{allowed},router_replay"
    return wanted


def _has_tokenizer(model: str) -> bool:
    """Return False only for a local folder without a tokenizer, which can still serve token ids."""
    folder = pathlib.Path(model)
    return not folder.is_dir() or any(folder.glob("tokenizer*")) or any(folder.glob("*.tiktoken"))
