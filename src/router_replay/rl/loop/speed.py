"""Compute how fast the trainer was in a step: tokens, operations, the share of the device's peak, and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence

import torch

from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.base import BasePolicy
from router_replay.rl.policy.operations import Operations, peak_of
from router_replay.rl.processes.ranks import Ranks


class Speed:
    """Measure the trainer of a run. Only the first rank has this object; its ranks are alike."""

    def __init__(self, config: TrainConfig, policy: BasePolicy) -> None:
        self._reference, self._scored = bool(config.reference.kl), config.loss.old == "policy"
        self._operations = Operations(policy.model, policy.spec)

    def of_step(self, lengths: Sequence[int], seconds: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
        """Return the figures of a step by the names of the metrics.

        `lengths` are those of the step's sequences, `seconds` the times of its phases. The peak memory is that since
        the last call.
        """
        trained = seconds["seconds/score"] + seconds["seconds/update"]
        rate = self._operations.step(lengths, self._reference, self._scored) / trained / ranks.world
        values = {
            "trainer/tokens_per_second": sum(lengths) / trained,
            "trainer/tflops": rate / 1e12,
            "memory/peak_gib": _peak_bytes(ranks.device) / 2**30,
        }
        peak = peak_of(ranks.device)
        return values if peak is None else {**values, "trainer/peak_share": rate / peak}


def _peak_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux counts KiB
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
