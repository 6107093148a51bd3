"""Measure the log-prob gap of TRL's passes, over all processes, under the names of `docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from router_replay import measure


def mismatch(
    accelerator: Any, trained: torch.Tensor, batch: Mapping[str, Any], sampled: torch.Tensor
) -> dict[str, float]:
    """Return the gap between the trainer's log-probs `trained` and those of the engine, `sampled`, in a `batch` dict.

    All processes of `accelerator` must call this.
    """
    mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool() & ~torch.isnan(sampled)
    sums, largest = [0.0] * 5, 0.0
    if mask.any():  # mask_truncated_completions may leave nothing
        gap = measure.logprob_gap(trained, sampled, mask)
        of_tokens = (1.0, gap.k1, gap.k3, gap.abs_mean, gap.extreme(2.0))
        sums, largest = [mean * gap.tokens for mean in of_tokens], gap.abs_max
    tokens, k1, k3, absolute, extreme = summed(accelerator, torch.tensor(sums, dtype=torch.float64)).tolist()
    if not tokens:
        return {}
    abs_max = accelerator.gather(torch.tensor([largest], device=accelerator.device)).max().item()
    totals = {"k1": k1, "k3": k3, "abs_mean": absolute, "extreme_tau2": extreme}
    return {"mismatch/abs_max": abs_max} | {f"mismatch/{name}": total / tokens for name, total in totals.items()}


def summed(accelerator: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over all processes of `accelerator`, each of which must call this."""
    return accelerator.reduce(values.to(accelerator.device), "sum")
