"""Compute the metrics of a step from the results of its phases: every name in metrics.py except the times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from router_replay.measure import RouterFigures, logprob_gap
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.routing_values import routing_values
from router_replay.rl.rollout import Episode
from router_replay.rl.rollout.episodes import episode_figures


def step_values(
    config: TrainConfig,
    episodes: Sequence[Episode],
    figures: Sequence[dict[str, float]],
    logprobs: Sequence[np.ndarray],
    routes: Stats,
    routers: RouterFigures | None = None,
) -> dict[str, Any]:
    """Return the metrics of a step by name.

    `figures` has one entry per mini-batch. `logprobs` has one [2, tokens] array per rank: the old and the rollout
    log-probs. `routes` are the counts of the rows, and `routers` the figures of the routers, if they are measured.
    """
    values: dict[str, Any] = dict(episode_figures(episodes))
    values |= {name: float(np.mean([one[name] for one in figures])) for name in figures[0]}
    if config.loss.old == "policy":  # otherwise nothing was computed that could be compared with the rollout
        old, rollout = np.concatenate(logprobs, axis=1)
        gap = logprob_gap(old, rollout)
        values |= {
            "mismatch/k1": gap.k1,
            "mismatch/k3": gap.k3,
            "mismatch/abs_mean": gap.abs_mean,
            "mismatch/abs_max": gap.abs_max,
            "mismatch/extreme_tau2": gap.extreme(2.0),
        }
    values |= {
        "routes/replayed": routes.rows_replayed[0],
        "routes/live": routes.rows_live[0],
        "lr": figures[-1]["lr"],
    }
    values |= routing_values(routes, routers)
    if not config.reference.kl:
        del values["reference_kl"]
    if not config.loss.truncated_importance:
        del values["truncated_fraction"]
    return values
