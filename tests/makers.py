"""Makers of random routes that tests share."""

from __future__ import annotations

import numpy as np

from router_replay.routes import Routes
from router_replay.spec import RouterSpec


def random_ids(rows: int, spec: RouterSpec, seed: int = 0) -> np.ndarray:
    """Valid ids [rows, layers, top_k]: distinct experts in random slot order."""
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(spec.layers), spec.num_experts))
    return np.argsort(scores, axis=-1)[..., : spec.top_k].astype(spec.dtype)


def random_routes(rows: int, spec: RouterSpec, seed: int = 0) -> Routes:
    return Routes(random_ids(rows, spec, seed), spec)
