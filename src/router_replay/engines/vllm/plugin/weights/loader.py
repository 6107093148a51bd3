"""Load new weights in place from any source, with the repair that vLLM's CPU kernels need.

Weights are opened and checked first (sources.py, fitting.py), so that a wrong source changes nothing, and then loaded.
If a load fails partway, the engine's weights are unknown, and from then on it refuses to run.

On the CPU, `reload_weights` of vLLM 0.28 to 0.30 leaves MoE weights in the checkpoint's layout, because
`UnquantizedFusedMoEMethod._setup_kernel` prepacks them only if there is no kernel yet. The outputs are then wrong
without an error. Removing the kernel before the reload makes vLLM prepack again, and the result is bit-identical to a
fresh engine's. The same reload leaves the output head of a model with tied embeddings as it was: it gets no weights of
its own, and its kernel holds a packed copy of the old ones. It is packed again afterwards.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from router_replay.engines.vllm.plugin.weights.direct import Plan, holds_packed_weights, plan_for, users_of
from router_replay.engines.vllm.plugin.weights.fitting import Fitting
from router_replay.engines.vllm.plugin.weights.sources import Index, Weights, files_of, open_source
from router_replay.errors import EngineError, RouterReplayError

logger = logging.getLogger("vllm.router_replay")  # vLLM sets up the loggers below its own name
# The modules that reload weights in vLLM up to 0.31, and since 0.32.
RELOADERS = ("vllm.v1.worker.gpu_model_runner", "vllm.model_executor.model_loader.reload.inplace")
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
NOT_LOADED, NOTHING_LOADED = "Following weights were not loaded from checkpoint", "%s: Failed to load weights"


class WeightLoader:
    """Load the weights of one worker. `broken` gives the reason if their contents are unknown."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        config = worker.model_runner.model_config
        start, revision = str(config.model), config.revision  # read now: vLLM's own reload overwrites the path
        self._fitting = Fitting(worker.model_runner.get_model(), lambda: start_weights(start, revision))
        self._plan: Plan | None = None
        self._planned: Index | None = None  # the weights that the plan, or its absence, is for
        self.why_loader: dict[str, str] = {}
        self.last: dict[str, Any] = {}
        self.broken = ""

    def open(self, source: Mapping[str, Any]) -> Weights:
        """Return the weights of a source that fits, or raise EngineError. The running weights are not changed."""
        from vllm.config import set_current_vllm_config

        if self.broken:
            raise EngineError(self.broken)
        weights = open_source(source)
        with set_current_vllm_config(self._worker.vllm_config):
            self._fitting.check(weights)
        return weights

    def load(self, weights: Weights) -> dict[str, Any]:
        """Replace the running weights with opened ones, and say how.

        vLLM's loader makes the first update. Later ones are written into the tensors directly, as far as the check
        after the first one allows it (direct.py).
        """
        plan = self._plan if self._plan is not None and self._plan.fits(weights) else None
        try:
            self.last = self._load_all(weights) if plan is None else self._load_by(plan, weights)
        except BaseException as error:
            self.broken = (
                f"loading {weights.where} failed partway, so it is unknown which weights the worker has: {error!r}"
            )
            raise EngineError(self.broken) from error
        if self._planned != weights.index:
            self._make_plan(weights)
        return self.last

    def _load_all(self, weights: Weights) -> dict[str, Any]:
        began = time.perf_counter()
        repaired = self._reload(iter(weights))
        seconds = time.perf_counter() - began
        logger.info("new weights: vLLM's loader took %.3f s", seconds)
        return {"repaired_layers": repaired, "copies": 0, "seconds_direct": 0.0, "seconds_loader": seconds}

    def _load_by(self, plan: Plan, weights: Weights) -> dict[str, Any]:
        runner = self._worker.model_runner
        began = time.perf_counter()
        copies = plan.write(runner.get_model(), weights)
        self._wait()
        written = time.perf_counter()
        repaired = 0
        if plan.remaining:
            repaired = self._reload(plan.rest(weights), frozenset(plan.reasons))
        else:  # what the reload of the model runner does beside loading
            for name in ("reset_encoder_cache", "reset_mm_cache"):
                getattr(runner, name, lambda: None)()
        ended = time.perf_counter()
        logger.info(
            "new weights: %.3f s to write %d parameters directly with %d copies, %.3f s of vLLM's loader for %d layers",
            written - began, plan.parameters, copies, ended - written, len(plan.reasons),
        )  # fmt: skip
        seconds = {"seconds_direct": written - began, "seconds_loader": ended - written}
        return {"repaired_layers": repaired, "copies": copies, **seconds}

    def _reload(self, weights: Iterator[tuple[str, torch.Tensor]], layers: frozenset[str] | None = None) -> int:
        """Load by vLLM's own loader: all layers, or those with weights in `weights`, whose names are `layers`."""
        model = self._worker.model_runner.get_model()
        repaired = forget_cpu_kernels(model, layers) if self._on_cpu else 0
        with without_false_alarm(partial=layers is not None):
            self._worker.reload_weights(weights_iterator=weights)
        if self._on_cpu:
            repaired += pack_tied_again(model)
        self._wait()
        return repaired

    def _wait(self) -> None:
        if not self._on_cpu:
            torch.accelerator.synchronize()  # the trainer may free its memory when we return

    @property
    def _on_cpu(self) -> bool:
        return bool(self._worker.device.type == "cpu")

    def _make_plan(self, weights: Weights) -> None:
        """Find out how later weights like these, which were just loaded, can be written directly."""
        from vllm.config import set_current_vllm_config

        self._plan, self._planned = None, weights.index
        try:
            if self._worker.vllm_config.parallel_config.enable_eplb:
                raise EngineError("expert load balancing moves experts between ranks and slots")
            with set_current_vllm_config(self._worker.vllm_config):
                self._plan = plan_for(self._worker.model_runner.get_model(), weights)
        except RouterReplayError as error:
            self.why_loader = {"all layers": str(error)}
            logger.info("new weights: vLLM's loader will load all layers: %s", error)
            return
        self.why_loader = self._plan.reasons
        for reason, count in collections.Counter(self._plan.reasons.values()).most_common(3):
            logger.info("new weights: vLLM's loader will load %d layers, such as one because %s", count, reason)

    def report(self) -> dict[str, Any]:
        """Return how the last update was loaded, and why vLLM's loader loads which layers in the next."""
        parameters = 0 if self._plan is None else self._plan.parameters
        return {**self.last, "direct_parameters": parameters, "by_loader": self.why_loader}

    def refuse_broken(self) -> None:
        """Raise EngineError if an earlier load failed partway."""
        if self.broken:
            raise EngineError(f"{self.broken}. Restart vLLM")


@contextlib.contextmanager
def without_false_alarm(partial: bool = False) -> Iterator[None]:
    """Drop vLLM's warning that weights were not loaded, which is wrong for the experts of every MoE model.

    vLLM compares the names that its loaders return with the names of its parameters, and the loaders of fused experts
    return other names. `Fitting` has counted before that every parameter is filled. With `partial`, layers that were
    written directly get no weights here, and vLLM's warning of these is dropped too. Everything else is logged.
    """
    dropped = [NOT_LOADED, NOTHING_LOADED] if partial else [NOT_LOADED]

    def is_true(record: logging.LogRecord) -> bool:
        return not any(str(record.msg).startswith(text) for text in dropped)

    loggers = [logging.getLogger(name) for name in (*RELOADERS, LAYERWISE)]
    for one in loggers:
        one.addFilter(is_true)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(is_true)


def start_weights(model: str, revision: str | None) -> Weights | None:
    """Return the checkpoint that an engine started from, in a folder or the hub's cache, or None if there is none."""
    folder = pathlib.Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = pathlib.Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:
            logger.info("%s is not in the local cache of the Hugging Face hub (%s)", model, error)
    if folder.is_dir() and files_of(folder):
        return open_source({"path": str(folder)})
    logger.warning(
        "found no safetensors file of %s to compare new weights with: the first update is assumed to be complete", model
    )
    return None


def forget_cpu_kernels(model: Any, layers: frozenset[str] | None = None) -> int:
    """Make each MoE layer, or those in `layers`, set up its kernel again after the reload; return their number."""
    modules = [module for path, module in model.named_modules() if layers is None or path in layers]
    methods: list[Any] = [getattr(module, "quant_method", None) for module in modules]
    methods = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in methods:
        method.moe_kernel = None
    return len(methods)


def pack_tied_again(model: Any) -> int:
    """Pack the weights of layers again that share them with another layer; return their number."""
    shared = [module for modules in users_of(model).values() if len(modules) > 1 for module in modules]
    packed = [module for module in dict.fromkeys(shared) if holds_packed_weights(module)]
    for module in packed:
        module.quant_method.process_weights_after_loading(module)
    return len(packed)
