"""Load new weights in place from any source, with the repair that vLLM's CPU kernels need.

Weights are opened and checked first (sources.py, fitting.py), so that a wrong source changes nothing, and then loaded.
If a load fails partway, the engine's weights are unknown, and from then on it refuses to run.

On the CPU, `reload_weights` of vLLM 0.28 to 0.30 leaves MoE weights in the checkpoint's layout, because
`UnquantizedFusedMoEMethod._setup_kernel` prepacks them only if there is no kernel yet. The outputs are then wrong
without an error. Removing the kernel before the reload makes vLLM prepack again, and the result is bit-identical to a
fresh engine's.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from router_replay.engines.vllm.plugin.weights.fitting import Fitting
from router_replay.engines.vllm.plugin.weights.sources import Weights, files_of, open_source
from router_replay.errors import EngineError

logger = logging.getLogger(__name__)
# The modules that reload weights in vLLM up to 0.31, and since 0.32.
RELOADERS = ("vllm.v1.worker.gpu_model_runner", "vllm.model_executor.model_loader.reload.inplace")


class WeightLoader:
    """Load the weights of one worker. `broken` gives the reason if their contents are unknown."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        config = worker.model_runner.model_config
        start, revision = str(config.model), config.revision  # read now: vLLM's own reload overwrites the path
        self._fitting = Fitting(worker.model_runner.get_model(), lambda: start_weights(start, revision))
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
        """Replace the running weights with opened ones."""
        worker = self._worker
        on_cpu = worker.device.type == "cpu"
        try:
            repaired = forget_cpu_kernels(worker.model_runner.get_model()) if on_cpu else 0
            with without_false_alarm():
                worker.reload_weights(weights_iterator=iter(weights))
            if not on_cpu:
                torch.accelerator.synchronize()  # the trainer may free its memory when we return
        except BaseException as error:
            self.broken = (
                f"loading {weights.where} failed partway, so it is unknown which weights the worker has: {error!r}"
            )
            raise EngineError(self.broken) from error
        return {"repaired_layers": repaired}

    def refuse_broken(self) -> None:
        """Raise EngineError if an earlier load failed partway."""
        if self.broken:
            raise EngineError(f"{self.broken}. Restart vLLM")


@contextlib.contextmanager
def without_false_alarm() -> Iterator[None]:
    """Drop vLLM's warning that weights were not loaded, which is wrong for the experts of every MoE model.

    vLLM compares the names that its loaders return with the names of its parameters, and the loaders of fused experts
    return other names. `Fitting` has counted before that every parameter is filled. Everything else is logged.
    """

    def is_true(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Following weights were not loaded from checkpoint")

    loggers = [logging.getLogger(name) for name in RELOADERS]
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


def forget_cpu_kernels(model: Any) -> int:
    """Make each MoE layer set up its kernel again after the reload; return how many kernels were removed."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    methods = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in methods:
        method.moe_kernel = None
    return len(methods)
