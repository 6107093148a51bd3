"""Run inside a vLLM worker: force routes on its model, and answer the calls that our engines make.

vLLM gives a plugin no object to store state on, so two methods of `Worker` are wrapped on the class and three are added
to it. All state is in the worker's attribute `router_replay`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from router_replay import __version__
from router_replay.engines.vllm.plugin import BACKEND, ENVIRONMENT, OBSERVE, REQUIRED, seams
from router_replay.engines.vllm.plugin.routes import delivery, precision
from router_replay.engines.vllm.plugin.routes.forcing import ForcedRouting, refuse_unsupported
from router_replay.engines.vllm.plugin.runner import Step, captures, watch
from router_replay.engines.vllm.plugin.weights.loader import WeightLoader
from router_replay.engines.vllm.plugin.weights.sources import gpu_name
from router_replay.errors import EngineError, RouterReplayError
from router_replay.spec import RouterSpec

KEPT = 4096  # number of finished requests whose progress is remembered


class WorkerState:
    """Hold the plugin's state of one worker: forcing or why there is none, progress of requests, and weights."""

    def __init__(self, worker: Any) -> None:
        import vllm

        runner = worker.model_runner
        precision.refuse_unconverted(runner.get_model())
        self.weights = WeightLoader(worker)
        self.forcing: ForcedRouting | None = None
        self.rules: dict[str, int] = {}
        self.reason = ""
        self.updates = 0
        self._computed: dict[str, int] = {}
        try:
            if os.environ.get(ENVIRONMENT) == OBSERVE:
                raise EngineError(
                    f"forced routing was turned off when the engine was started ({ENVIRONMENT}={OBSERVE})"
                )
            refuse_unsupported(runner.vllm_config)
            forcing = ForcedRouting(runner, RouterSpec.from_config(runner.model_config.hf_config))
            self.rules = forcing.install()
            self.forcing = forcing
        except RouterReplayError as error:
            self.reason = str(error)
            if os.environ.get(ENVIRONMENT) == REQUIRED:
                raise
        watch(runner, vllm.__version__, self.weights.refuse_broken, self._on_step)

    def _on_step(self, step: Step) -> None:
        self._note_progress(step)
        if self.forcing is not None:
            self.forcing.fill(step)

    def _note_progress(self, step: Step) -> None:
        for name, end in zip(step.names, (step.computed + step.scheduled).tolist(), strict=True):
            # Tokens recomputed after a preemption were already sampled from. `pop` moves the request to the end.
            self._computed[name] = max(end, self._computed.pop(name, 0))
        if len(self._computed) > 2 * (len(step.live) + KEPT):
            finished = [name for name in self._computed if name not in step.live]
            for name in finished[:-KEPT]:
                del self._computed[name]

    def progress(self) -> dict[str, int]:
        """Return how many rows of each request were computed so far, by vLLM's internal request id.

        Requests that finished recently are included: their answer may still be on its way to the client, which must not
        treat them as requests that have not started.
        """
        return dict(self._computed)


def report(worker: Any) -> dict[str, Any]:
    """Return the plugin's state in this worker, with the reason if it cannot force routes."""
    state: WorkerState = worker.router_replay
    config = worker.model_runner.model_config
    return {
        "plugin": __version__,
        "active": True,
        "forced_routes": state.forcing is not None,
        "reason": state.reason,
        "rules": state.rules,
        "forced_rows": state.forcing.forced_rows if state.forcing is not None else 0,
        "weight_updates": state.updates,
        "weights": state.weights.report(),
        "gpu": gpu_name(worker.device.index or 0) if worker.device.type == "cuda" else "",
        "captures": captures(worker.vllm_config),
        "delivery": delivery.state(worker.vllm_config),
        "logprobs_mode": str(config.logprobs_mode),
        "config": json.dumps(config.hf_config.to_dict(), default=str),
        "generation_config": json.dumps(config.try_get_generation_config(), default=str),
        "seams": seams.table(),
    }


def find_weights(worker: Any, source: str) -> dict[str, str]:
    """Check that a weight source can be opened; return the `reason` if not, else an empty one.

    It is called before anything is paused or aborted, so that a mistyped path does not cost a batch.
    """
    state: WorkerState = worker.router_replay
    try:
        state.weights.open(json.loads(source))
    except RouterReplayError as error:
        return {"reason": str(error)}
    return {"reason": ""}


def update_weights(worker: Any, source: str) -> dict[str, Any]:
    """Replace the weights in place, and return how far each running request had come with the old ones.

    If the weights are refused before anything is touched, only the `reason` is returned. A load that fails partway
    raises.
    """
    state: WorkerState = worker.router_replay
    done = state.progress()
    try:
        weights = state.weights.open(json.loads(source))
    except RouterReplayError as error:
        return {"reason": str(error)}
    result = state.weights.load(weights)
    state.updates += 1
    return {**result, "reason": "", "progress": done}


def install() -> None:
    """Wrap and add methods of Worker, and register our weight-transfer backend."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "router_replay_update_weights"):  # vLLM refuses to register a name twice
        return
    seams.wrap(Worker, "load_model", _loading)
    seams.wrap(Worker, "compile_or_warm_up_model", _warming_up)
    seams.wrap(Worker, "start_weight_update", _starting_an_update)
    Worker.router_replay_report = report
    Worker.router_replay_find_weights = find_weights
    Worker.router_replay_update_weights = update_weights
    transfer = "router_replay.engines.vllm.plugin.weights.transfer"
    WeightTransferEngineFactory.register_engine(BACKEND, transfer, "RouterReplayTransfer")


def _loading(original: Any) -> Any:
    def load_model(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        self.router_replay = WorkerState(self)
        if _takes_ours(self):
            self.weight_transfer_engine.loader = self.router_replay.weights

    return load_model


def _warming_up(original: Any) -> Any:
    def compile_or_warm_up_model(self: Any, *arguments: Any, **more: Any) -> Any:
        result = original(self, *arguments, **more)
        forcing = self.router_replay.forcing
        if forcing is not None:
            forcing.warm = True
        return result

    return compile_or_warm_up_model


def _starting_an_update(original: Any) -> Any:
    def start_weight_update(self: Any, *arguments: Any, **more: Any) -> None:
        # Our backend changes nothing before the finish, so an update that failed in another worker need not block a new
        # one.
        if _takes_ours(self):
            self._weight_update_active = False
        original(self, *arguments, **more)

    return start_weight_update


def _takes_ours(worker: Any) -> bool:
    config = worker.vllm_config.weight_transfer_config
    return config is not None and config.backend == BACKEND
