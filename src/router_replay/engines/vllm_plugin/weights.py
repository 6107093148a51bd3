"""New weights in place from a Hugging Face folder, with the repair that vLLM's CPU kernels need.

vLLM 0.28 to 0.30 on the CPU: `reload_weights` leaves MoE weights in the layout of the checkpoint, since
`UnquantizedFusedMoEMethod._setup_kernel` prepacks them only when there is no kernel yet. Outputs are then
wrong, without an error. Forgetting the kernel before the reload makes it prepack again; the result equals
a fresh engine's to the bit.
"""

from __future__ import annotations

import pathlib
from typing import Any


def update_from_folder(worker: Any, folder: str) -> dict[str, Any]:
    """Load the safetensors of `folder` (which may lie in /dev/shm) into the running model."""
    repaired = forget_cpu_kernels(worker.model_runner.model) if worker.device.type == "cpu" else 0
    worker.reload_weights(weights_path=folder)
    return {"repaired_layers": repaired}


def why_not_loadable(folder: str) -> str:
    """Asked before anything is paused or aborted: a mistyped path must not cost a batch. Empty where it can be."""
    if any(pathlib.Path(folder).glob("*.safetensors")):
        return ""
    return f"no .safetensors file in {folder}, as the vLLM worker sees it: expected a folder that save_pretrained wrote"


def forget_cpu_kernels(model: Any) -> int:
    """Make each MoE layer set its kernel up anew after the reload; returns how many there were."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    methods = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in methods:
        method.moe_kernel = None
    return len(methods)
