"""What runs inside a vLLM worker: forced routing on its model, and the calls an engine of ours makes.

vLLM gives a plugin no object to hang state on, so `Worker.load_model` is wrapped on the class and four
methods are added to it; all state lives on the worker's own attribute `router_replay`.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import numpy as np

from router_replay import __version__
from router_replay.engines.vllm_plugin import ENVIRONMENT, OBSERVE, REQUIRED
from router_replay.engines.vllm_plugin.forcing import ForcedRouting, refuse_unsupported
from router_replay.engines.vllm_plugin.weights import update_from_folder, why_not_loadable
from router_replay.errors import EngineError, RouterReplayError
from router_replay.spec import RouterSpec

KEPT = 4096  # finished requests whose progress is remembered


class WorkerState:
    """What the plugin knows of one worker: its forcing, or why there is none, and how far each request is."""

    def __init__(self, runner: Any) -> None:
        self.forcing: ForcedRouting | None = None
        self.rules: dict[str, int] = {}
        self.reason = ""
        self.updates = 0
        self._runner = runner
        self._computed: dict[str, int] = {}
        try:
            if os.environ.get(ENVIRONMENT) == OBSERVE:
                raise EngineError(f"it was switched off when the engine was started ({ENVIRONMENT}={OBSERVE})")
            refuse_unsupported(runner.vllm_config)
            forcing = ForcedRouting(runner, RouterSpec.from_config(runner.model_config.hf_config))
            self.rules = forcing.install()
            self.forcing = forcing
        except RouterReplayError as error:
            self.reason = str(error)
            if os.environ.get(ENVIRONMENT) == REQUIRED:
                raise
        if hasattr(runner, "_prepare_inputs"):
            runner._prepare_inputs = self._watching(runner._prepare_inputs)

    def _watching(self, original: Any) -> Any:
        @functools.wraps(original)
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: np.ndarray, *rest: Any, **more: Any) -> Any:
            self._note_progress(num_scheduled_tokens)
            if self.forcing is not None:
                self.forcing.fill(scheduler_output, num_scheduled_tokens)
            return original(scheduler_output, num_scheduled_tokens, *rest, **more)

        return prepare_inputs

    def _note_progress(self, scheduled: np.ndarray) -> None:
        batch = self._runner.input_batch
        names = batch.req_ids[: len(scheduled)]
        ends = batch.num_computed_tokens_cpu[: len(scheduled)] + scheduled
        self._computed.update(zip(names, ends.tolist(), strict=True))
        if len(self._computed) > 2 * len(self._runner.requests) + KEPT:
            self._computed = {name: end for name, end in self._computed.items() if name in self._runner.requests}

    def progress(self) -> dict[str, int]:
        """How many rows of each request were computed so far, by vLLM's internal request id.

        Requests that finished a moment ago are in it: their answer may still be on its way to the client, which
        must not take them for requests that have not started.
        """
        return dict(self._computed)


def report(worker: Any) -> dict[str, Any]:
    """Proof that the plugin is active here, or the reason why it cannot force routes."""
    state: WorkerState = worker.router_replay
    config = worker.model_runner.model_config
    return {
        "plugin": __version__,
        "forced_routes": state.forcing is not None,
        "reason": state.reason,
        "rules": state.rules,
        "forced_rows": state.forcing.forced_rows if state.forcing is not None else 0,
        "weight_updates": state.updates,
        "captures": bool(config.enable_return_routed_experts),
        "logprobs_mode": str(config.logprobs_mode),
        "config": json.dumps(config.hf_config.to_dict(), default=str),
        "generation_config": json.dumps(config.try_get_generation_config(), default=str),
    }


def find_weights(_: Any, folder: str) -> dict[str, str]:
    return {"reason": why_not_loadable(folder)}


def progress(worker: Any) -> dict[str, int]:
    state: WorkerState = worker.router_replay
    return state.progress()


def update_weights(worker: Any, folder: str) -> dict[str, Any]:
    """Swap the weights in place, and say how far each request in flight had come with the old ones."""
    state: WorkerState = worker.router_replay
    done = state.progress()
    result = update_from_folder(worker, folder)
    state.updates += 1
    return {**result, "progress": done}


def install() -> None:
    """Wrap Worker.load_model once per process."""
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "router_replay_report"):
        return
    original = Worker.load_model

    @functools.wraps(original)
    def load_model(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        self.router_replay = WorkerState(self.model_runner)

    Worker.load_model = load_model
    Worker.router_replay_report = report
    Worker.router_replay_progress = progress
    Worker.router_replay_find_weights = find_weights
    Worker.router_replay_update_weights = update_weights
