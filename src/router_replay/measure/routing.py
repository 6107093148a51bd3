"""RouterFigures says how the routers of a model used their experts, layer by layer.

figures = RouterFigures.from_sums(spec, gauge.take())
figures.imbalance         # [1.8, 2.3]: load of the busiest expert over the mean, per routed layer
figures.confidence        # [0.71, 0.55]: mass that the router gives to the chosen experts
figures.entropy           # [2.1, 2.9]: of the router's distribution, in nats; at most log(experts)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from router_replay.errors import MeasureError
from router_replay.spec import RouterSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RouterFigures:
    """The figures of `rows` tokens. `load` [L, E] counts how often each expert was chosen.

    `confidence` [L] is the mean mass of the chosen experts under the router's own distribution over all experts, and
    `entropy` [L] the mean entropy of that distribution, in nats. Both are NaN if there are no rows.
    """

    rows: int
    load: np.ndarray
    confidence: np.ndarray
    entropy: np.ndarray

    @property
    def imbalance(self) -> np.ndarray:
        """The load of the busiest expert over the mean load, [L]: 1 if even, experts / top-k at most."""
        mean = self.load.mean(axis=1)
        return np.divide(self.load.max(axis=1), mean, out=np.full(len(mean), np.nan), where=mean > 0)

    @classmethod
    def from_sums(cls, spec: RouterSpec, sums: Any) -> RouterFigures:
        """Read the sums that `RouterGauge.take` returned, or their sum over ranks, for the routers of `spec`."""
        layers, experts = len(spec.layers), spec.num_experts
        found = np.asarray(sums.tolist() if hasattr(sums, "tolist") else sums, np.float64)
        expected = 1 + layers * (2 + experts)
        if found.shape != (expected,):
            raise MeasureError(f"sums of {spec} must have {expected} entries, got {list(found.shape)}")
        rows = round(float(found[0]))
        both = found[1 : 1 + 2 * layers].reshape(2, layers) / (rows or np.nan)
        return cls(rows, found[1 + 2 * layers :].reshape(layers, experts).round().astype(np.int64), both[0], both[1])
