"""New weights in place, whichever way they come, with the repair that vLLM's CPU kernels need.

Weights are opened and checked first, so that a wrong source changes nothing (sources.py, fitting.py), and loaded
then. A load that fails on the way leaves something unknown in the engine: from then on it refuses to run.

vLLM 0.28 to 0.30 on the CPU: `reload_weights` leaves MoE weights in the layout of the checkpoint, since
`UnquantizedFusedMoEMethod._setup_kernel` prepacks them only when there is no kernel yet. Outputs are then
wrong, without an error. Forgetting the kernel before the reload makes it prepack again; the result equals
a fresh engine's to the bit.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from router_replay.engines.vllm.plugin.weights.fitting import Fitting
from router_replay.engines.vllm.plugin.weights.sources import Weights, files_of, open_source
from router_replay.errors import EngineError

logger = logging.getLogger(__name__)


class WeightLoader:
    """The weights of one worker. `broken` says why they are unknown, where they are."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        config = worker.model_runner.model_config
        start, revision = str(config.model), config.revision  # now: vLLM's own reload writes its path over it
        self._fitting = Fitting(worker.model_runner.get_model(), lambda: start_weights(start, revision))
        self.broken = ""

    def open(self, source: Mapping[str, Any]) -> Weights:
        """The weights of a source that fits, or EngineError; the running weights are as they were."""
        from vllm.config import set_current_vllm_config

        if self.broken:
            raise EngineError(self.broken)
        weights = open_source(source)
        with set_current_vllm_config(self._worker.vllm_config):
            self._fitting.check(weights)
        return weights

    def load(self, weights: Weights) -> dict[str, Any]:
        """Put opened weights in the place of the running ones."""
        worker = self._worker
        on_cpu = worker.device.type == "cpu"
        try:
            repaired = forget_cpu_kernels(worker.model_runner.get_model()) if on_cpu else 0
            worker.reload_weights(weights_iterator=iter(weights))
            if not on_cpu:
                torch.accelerator.synchronize()  # the trainer may take its memory back when we return
        except BaseException as error:
            self.broken = f"loading {weights.where} failed on the way, what the worker holds is unknown: {error!r}"
            raise EngineError(self.broken) from error
        return {"repaired_layers": repaired}

    def refuse_broken(self) -> None:
        if self.broken:
            raise EngineError(f"{self.broken}; start the engine anew")


def start_weights(model: str, revision: str | None) -> Weights | None:
    """The checkpoint that an engine was started on, a folder or in the hub's cache; None where there is none."""
    folder = pathlib.Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = pathlib.Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:
            logger.info("%s is not in the cache of the hub (%s)", model, error)
    if folder.is_dir() and files_of(folder):
        return open_source({"path": str(folder)})
    logger.warning("no safetensors of %s here: the first weights that come are taken to be whole", model)
    return None


def forget_cpu_kernels(model: Any) -> int:
    """Make each MoE layer set its kernel up anew after the reload; returns how many there were."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    methods = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in methods:
        method.moe_kernel = None
    return len(methods)
