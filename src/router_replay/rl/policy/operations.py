"""Count the floating-point operations of a training step, and compare them with what the device can do.

The count is that of the model itself: two operations per weight of a matrix that a token passes through, the chosen
experts only, and the products of attention inside each sequence. An update is three forward passes (the backward pass
computes two products for each of the forward pass). Activations that checkpointing computes again are not counted, as
is usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from router_replay.spec import RouterSpec

# Dense bfloat16 operations per second, from the makers' data sheets. The first name that is part of the device's
# name counts.
PEAKS: tuple[tuple[str, float], ...] = (
    ("B300", 2.25e15), ("GB200", 2.5e15), ("B200", 2.25e15), ("H200", 9.89e14), ("GH200", 9.89e14),
    ("H100 PCIe", 7.56e14), ("H100 NVL", 8.35e14), ("H100", 9.89e14), ("H20", 1.48e14), ("A100", 3.12e14),
    ("A800", 3.12e14), ("L40S", 3.62e14), ("L40", 1.81e14), ("L4", 1.21e14), ("A10", 1.25e14),
    ("MI355X", 2.5e15), ("MI325X", 1.307e15), ("MI300X", 1.307e15),
)  # fmt: skip


class Operations:
    """Counts the operations of passes through `model`, whose routers are described by `spec`."""

    def __init__(self, model: nn.Module, spec: RouterSpec) -> None:
        self._per_token = float(sum(_of_module(module, spec) for module in model.modules()))
        config: Any = model.config
        self._per_pair, self._windows = _attention(config.get_text_config())

    def forward(self, lengths: Iterable[int]) -> float:
        """Return the operations of one forward pass over sequences of these `lengths`."""
        total = 0.0
        for length in lengths:
            pairs = sum(_pairs(length, window) for window in self._windows)
            total += self._per_token * length + self._per_pair * pairs
        return total

    def step(self, lengths: Iterable[int], reference: bool = False, scored: bool = True) -> float:
        """Return the operations of score and update over these sequences.

        `reference`: with a reference model. `scored`: with a pass for the old log-probs.
        """
        return self.forward(lengths) * (3 + scored + reference)


def peak_of(device: torch.device) -> float | None:
    """Return the peak of `device` in bfloat16 operations per second, or None if it is not known (as for CPUs)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS if known in name), None)


def _of_module(module: nn.Module, spec: RouterSpec) -> float:
    """Return the operations per token of the module's own weights."""
    if isinstance(module, nn.Embedding):
        return 0.0
    found = 0.0
    for weight in module.parameters(recurse=False):
        if weight.ndim == 2:
            found += 2 * weight.numel()
        elif weight.ndim == 3:
            routed = weight.shape[0] == spec.num_experts
            found += 2 * weight.numel() * (spec.top_k / spec.num_experts if routed else 1)
    return found


def _attention(config: Any) -> tuple[float, list[int | None]]:
    """Return the operations per pair of tokens in one layer, and the window of each layer with attention."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "qk_head_dim", None) or size
    values = getattr(config, "v_head_dim", None) or size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    attends = [kind for kind in kinds if kind.endswith("attention") and kind != "linear_attention"]
    windows = [None if kind == "full_attention" else window for kind in attends]
    return 2.0 * heads * (keys + values), windows


def _pairs(length: int, window: int | None) -> float:
    """Return how many (query, key) pairs a causal sequence has."""
    if window is None or window >= length:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window
