"""Put a fault into the rows of a sequence, to see that it is found. `stale` needs a model and is made elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from router_replay.errors import MeasureError
from router_replay.spec import RouterSpec


def _shift(ids_TLK: np.ndarray, spec: RouterSpec, _: int) -> np.ndarray:
    return np.concatenate([ids_TLK[:1], ids_TLK[:-1]])


def _layer_offset(ids_TLK: np.ndarray, spec: RouterSpec, _: int) -> np.ndarray:
    if len(spec.layers) < 2:
        raise MeasureError("layer-offset needs a model with two routed layers or more")
    return np.roll(ids_TLK, 1, axis=1)


def _zero(ids_TLK: np.ndarray, spec: RouterSpec, _: int) -> np.ndarray:
    return np.zeros_like(ids_TLK)


def _permuted_experts(ids_TLK: np.ndarray, spec: RouterSpec, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    permuted = [rng.permutation(spec.num_experts)[ids_TLK[:, column]] for column in range(len(spec.layers))]
    return np.stack(permuted, axis=1)


def _cast(ids_TLK: np.ndarray, spec: RouterSpec, _: int) -> np.ndarray:
    if spec.num_experts <= 256:
        raise MeasureError(
            f"cast needs a model with more than 256 experts, and this one has {spec.num_experts}: a byte holds all ids"
        )
    return ids_TLK & 255


INJECTED: Mapping[str, Callable[[np.ndarray, RouterSpec, int], np.ndarray]] = {
    "shift": _shift,
    "layer-offset": _layer_offset,
    "zero": _zero,
    "permuted-experts": _permuted_experts,
    "cast": _cast,
}
FAULT_NAMES = (*INJECTED, "stale")


def inject(fault: str, ids_TLK: np.ndarray, spec: RouterSpec, seed: int = 0) -> np.ndarray:
    """Return the rows of one sequence, int64, with `fault` in them; one of INJECTED.

    `spec` is that of the model, and `seed` decides what is random, the same in every sequence. Raises MeasureError if
    the model cannot have this fault.
    """
    return INJECTED[fault](np.asarray(ids_TLK, np.int64), spec, seed)
