"""Measures the log-prob gap between trainer and rollout engine, on the tokens that the engine sampled.

gap = logprob_gap(train_logprobs=[-1.0, -2.0], rollout_logprobs=[-1.0, -2.5])
gap.k1              # -0.25: mean of rollout - train
gap.abs_max         # 0.5
gap.extreme(1.5)    # 0.5: one of two tokens has a probability ratio above 1.5
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from router_replay.errors import MeasureError


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobGap:
    """Statistics of the differences d = train - rollout over the tokens that the mask selects.

    `tokens` is their number, `differences` [tokens] has every d. `abs_mean` and `abs_max` are the mean and the maximum
    of |d|, in nats. The tokens are samples of the rollout policy, so k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) both
    estimate KL(rollout || train); k3 is never negative and varies less.
    """

    tokens: int
    k1: float
    k3: float
    abs_mean: float
    abs_max: float
    differences: np.ndarray = dataclasses.field(repr=False, compare=False)

    def extreme(self, tau: float = 2.0) -> float:
        """Return the share of tokens whose probability ratio exceeds `tau` either way: F(tau) of the R3 paper."""
        if not (math.isfinite(tau) and tau >= 1):
            raise MeasureError(f"tau must be a finite ratio of probabilities of 1 or more, got {tau}")
        return float(np.mean(np.abs(self.differences) > math.log(tau)))


def logprob_gap(train_logprobs: Any, rollout_logprobs: Any, mask: Any = None) -> LogprobGap:
    """Measure the gap between `train_logprobs` and `rollout_logprobs` over the tokens that `mask` selects.

    Without a mask, all tokens count. The arguments are arrays, lists or torch tensors (on any device, in any float
    dtype) of the same shape. Raises MeasureError for other shapes, for an empty mask, and for a log-prob inside the
    mask that is not finite.
    """
    train = _floats(train_logprobs, "train_logprobs")
    rollout = _floats(rollout_logprobs, "rollout_logprobs")
    if train.shape != rollout.shape:
        raise MeasureError(
            "train_logprobs and rollout_logprobs must have the same shape, "
            f"got {list(train.shape)} and {list(rollout.shape)}"
        )
    selected = np.ones(train.shape, bool) if mask is None else _mask(mask, train.shape)
    if not selected.any():
        raise MeasureError(f"mask must select at least one token, got none of {train.size}: there is no gap to measure")
    for name, values in (("train_logprobs", train), ("rollout_logprobs", rollout)):
        bad = selected & ~np.isfinite(values)
        if bad.any():
            place = tuple(np.argwhere(bad)[0].tolist())
            where = place[0] if len(place) == 1 else place
            raise MeasureError(f"{name}[{where}] must be finite, since it is inside the mask, got {values[place]}")
    differences = train[selected] - rollout[selected]
    absolute = np.abs(differences)
    with np.errstate(over="ignore"):  # a token with such a large gap makes k3 infinite, which is correct
        k3 = np.mean(np.expm1(differences) - differences)
    differences.flags.writeable = False
    return LogprobGap(
        tokens=differences.size,
        k1=float(np.mean(-differences)),
        k3=float(k3),
        abs_mean=float(np.mean(absolute)),
        abs_max=float(np.max(absolute)),
        differences=differences,
    )


def _floats(values: Any, name: str) -> np.ndarray:
    if hasattr(values, "detach"):  # a torch tensor; NumPy has no bfloat16, and float64 must keep its precision
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, np.float64)
    except (ValueError, TypeError) as error:
        raise MeasureError(f"{name} must be numbers: {error}") from error


def _mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu().double().numpy()
    array = np.asarray(mask)
    if array.shape != shape:
        raise MeasureError(f"mask must have the shape {list(shape)} of the log-probs, got {list(array.shape)}")
    if array.dtype != bool and not (array.dtype.kind in "uif" and np.isin(array, (0, 1)).all()):
        raise MeasureError(f"mask must hold booleans, or only 0 and 1, got {array.dtype} with other values")
    return array.astype(bool)
