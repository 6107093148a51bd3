"""Counts how often each expert was chosen."""

from __future__ import annotations

import numpy as np

from router_replay.routes import Routes


def expert_load(routes: Routes) -> np.ndarray:
    """Return how often the captured rows of `routes` chose each expert, int64 [L, E].

    The largest number of a layer over its mean is 1 if the load is even.
    """
    spec = routes.spec
    ids_TLK = routes.ids if routes.all_captured else routes.ids[routes.captured]
    load_LE = np.zeros((len(spec.layers), spec.num_experts), np.int64)
    for column in range(len(spec.layers)):
        load_LE[column] = np.bincount(ids_TLK[:, column].ravel(), minlength=spec.num_experts)
    return load_LE
