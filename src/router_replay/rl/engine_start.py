"""Start or connect to the engine of a config, and check that it can do what the run needs."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import torch

from router_replay.engines.base import Engine
from router_replay.engines.checks import vocabulary_of
from router_replay.engines.environment import environment
from router_replay.errors import ConfigError
from router_replay.rl.config import EngineConfig, TrainConfig
from router_replay.spec import RouterSpec

# vLLM's CPU build needs these to start quickly and to leave the trainer its cores; the user's own settings win.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The engine core then runs the model itself if there is one worker. Otherwise vLLM starts a process for it, and the
    # two wait for each other in loops that use a core, also for a second after the last token.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# The run has its own display; vLLM reports problems through its errors.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# The numbers of requests for which vLLM captures a CUDA graph of a decode step; it pads a step to the next of them. By
# default vLLM captures 51 sizes, and each of them takes part of a second at every start.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
GRAPH_ARGUMENTS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "enforce_eager"}


def start_engine(
    config: TrainConfig, folder: pathlib.Path, spec: RouterSpec, version: int, table: EngineConfig | None = None
) -> Engine:
    """Start an engine with the weights of `folder`; a server that already runs gets them pushed.

    `table` has the settings of the engine; they are those of `[engine]` by default.
    """
    engine = _started(config, table or config.engine, folder, spec, version)
    try:
        check_engine(config, engine, spec)
    except BaseException:
        engine.close()
        raise
    return engine


def check_engine(config: TrainConfig, engine: Engine, spec: RouterSpec) -> None:
    """Raise ConfigError if the engine has another model than the policy, or lacks what this run needs of it."""
    can = engine.capabilities
    if engine.spec != spec:
        raise ConfigError(
            f"the engine has a model with {engine.spec}, but the policy has {spec}: start both with the same model"
        )
    if config.replay == "r3" and not can.routes:
        raise ConfigError(
            f'replay = "r3" needs an engine that returns the experts it used, and this one does not: {can.why_not}. '
            'Set replay = "r2" to record them in the trainer instead'
        )
    mode = config.asynchronous.on_new_weights if config.loop == "async" else None
    if mode == "resume" and not (can.routes and can.forced_routes):
        raise ConfigError(
            'asynchronous.on_new_weights = "resume" needs an engine that returns its experts and can be made to use '
            f'them again, and this one cannot: {can.why_not}. Set "recompute" or "keep"'
        )
    if mode == "keep" and can.cannot_keep:
        raise ConfigError(
            f'asynchronous.on_new_weights = "keep" is not possible with this engine: {can.cannot_keep}. Set "recompute"'
        )
    if config.rollout.seeded and not can.seeds:
        raise ConfigError(
            "rollout.seeded is true, but this engine ignores seeds: start SGLang with --enable-deterministic-inference"
            ", or set rollout.seeded = false; samples then differ from run to run"
        )
    if not can.versions:
        raise ConfigError(f"training needs an engine that takes new weights, and this one does not: {can.why_not}")


def _started(config: TrainConfig, engine: EngineConfig, folder: pathlib.Path, spec: RouterSpec, version: int) -> Engine:
    defaults: dict[str, Any]
    if engine.kind == "embedded":
        from router_replay.engines.embedded import EmbeddedEngine

        dtype = getattr(torch, engine.dtype)
        defaults = {"max_length": engine.max_length, "dtype": dtype, "router_dtype": config.model.router_dtype}
        return EmbeddedEngine(folder, version=version, **{**defaults, **engine.arguments})
    if engine.kind == "vllm":
        from router_replay.engines.vllm.inprocess import VllmEngine

        on_cpu = not torch.cuda.is_available()
        defaults = {"enforce_eager": True, "block_size": 32} if on_cpu else _graphs(engine.arguments)
        defaults |= {"router_dtype": config.model.router_dtype}
        defaults |= {"dtype": engine.dtype, "max_model_len": engine.max_length, "use_tqdm_on_load": False}
        arguments = {**defaults, **engine.arguments}
        with environment({**(CPU_ENVIRONMENT if on_cpu else {}), **QUIET}, keep_existing=True):
            return VllmEngine(str(folder), version=version, **arguments)
    if engine.kind == "vllm_http":
        from router_replay.engines.vllm.http import VllmHttpEngine

        connected: Engine = VllmHttpEngine(engine.url, version=version, spec=spec, **_of_server(engine, folder))
    elif engine.kind == "dynamo":
        from router_replay.engines.dynamo import DynamoEngine

        more = {"model": engine.model or None, "workers": engine.workers, **_of_server(engine, folder)}
        connected = DynamoEngine(engine.url, spec, version=version, **more)
    else:
        from router_replay.engines.sglang import SglangEngine

        connected = SglangEngine(engine.url, spec, version=version, **_of_server(engine, folder))
    try:
        connected.update_weights(str(folder), version)
    except BaseException:
        connected.close()
        raise
    return connected


def _graphs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the CUDA graph sizes for an engine with these arguments; nothing if they say something about graphs."""
    if GRAPH_ARGUMENTS & arguments.keys():
        return {}
    most = min(arguments.get("max_num_seqs", GRAPH_SIZES[-1]), GRAPH_SIZES[-1])
    return {"cudagraph_capture_sizes": [*(size for size in GRAPH_SIZES if size < most), most]}


def _of_server(engine: EngineConfig, folder: pathlib.Path) -> dict[str, Any]:
    """Return the extra settings of an engine behind a URL: the key, kept only in the environment, and the vocabulary.

    A server must not return tokens that the policy does not have.
    """
    name = engine.api_key_env
    key = os.environ.get(name) if name else None
    if name and not key:
        raise ConfigError(
            f"engine.api_key_env = {name!r}: this environment variable is not set, or empty; set it to the server's key"
        )
    vocabulary = vocabulary_of(json.loads((folder / "config.json").read_text()))
    return {"vocabulary": vocabulary, **engine.arguments, "api_key": key}
