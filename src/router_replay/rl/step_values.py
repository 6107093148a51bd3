"""What a step is measured by, from what its parts found out: one number for every name of metrics.py but the times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router_replay.measure import logprob_gap
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy import RouteCounts
from router_replay.rl.rollout import Episode
from router_replay.rl.rollout.episodes import episode_figures


def step_values(
    config: TrainConfig,
    episodes: Sequence[Episode],
    figures: Sequence[dict[str, float]],
    logprobs: Sequence[tuple[np.ndarray, np.ndarray] | None],
    counts: RouteCounts,
) -> dict[str, float]:
    """`figures` of each mini-batch; `logprobs`: old and rollout ones, of each rank that has any."""
    old, rollout = (np.concatenate([pair[side] for pair in logprobs if pair is not None]) for side in (0, 1))
    gap = logprob_gap(old, rollout)
    values = episode_figures(episodes)
    values |= {name: float(np.mean([one[name] for one in figures])) for name in figures[0]}
    values |= {
        "mismatch/k1": gap.k1,
        "mismatch/k3": gap.k3,
        "mismatch/abs_mean": gap.abs_mean,
        "mismatch/abs_max": gap.abs_max,
        "mismatch/extreme_tau2": gap.extreme(2.0),
        "routes/replayed": counts.replayed,
        "routes/live": counts.live,
        "lr": figures[-1]["lr"],
    }
    if counts.agreement is not None:
        values["routes/agreement"] = counts.agreement
    if not config.reference.kl:
        del values["reference_kl"]
    if not config.loss.truncated_importance:
        del values["truncated_fraction"]
    return values
