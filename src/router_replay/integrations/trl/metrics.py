"""Count rows and measure the log-prob gap of TRL's passes, over all processes, under the names of `docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from router_replay import measure
from router_replay.integrations.trl.rows import predicts
from router_replay.replay.stats import Stats


def route_counts(accelerator: Any, stats: Stats | None, attention_mask: torch.Tensor, prefix: str) -> dict[str, float]:
    """Return the rows of one pass that were replayed and that were routed live, and the agreement if it was measured.

    `stats` are those of the pass, or None if it was live; the rows of `attention_mask` are then counted. `prefix` comes
    before the names "replayed" and "live". All processes of `accelerator` must call this.
    """
    if stats is None:
        replayed, live, agreed, compared = 0.0, float(predicts(attention_mask).sum()), 0.0, 0
    else:
        replayed, live, compared = float(stats.rows_replayed[0]), float(stats.rows_live[0]), stats.rows_compared
        agreed = compared * sum(stats.agreement) / len(stats.agreement) if stats.agreement else 0.0
    replayed, live, agreed, all_compared = _summed(accelerator, [replayed, live, agreed, compared])
    found = {f"routes/{prefix}replayed": replayed, f"routes/{prefix}live": live}
    return found | ({"routes/agreement": agreed / all_compared} if all_compared else {})


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
    tokens, k1, k3, absolute, extreme = _summed(accelerator, sums)
    if not tokens:
        return {}
    abs_max = accelerator.gather(torch.tensor([largest], device=accelerator.device)).max().item()
    totals = {"k1": k1, "k3": k3, "abs_mean": absolute, "extreme_tau2": extreme}
    return {"mismatch/abs_max": abs_max} | {f"mismatch/{name}": total / tokens for name, total in totals.items()}


def _summed(accelerator: Any, values: list[float]) -> list[float]:
    return accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=accelerator.device), "sum").tolist()
