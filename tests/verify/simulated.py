"""Routers without a model: scores of tokens, and what engine and trainer choose by them with rounding of their own."""

from __future__ import annotations

import numpy as np

from router_replay.spec import RouterSpec
from router_replay.verify.evidence import Evidence
from router_replay.verify.inject import inject

SPECS = {
    "tiny": RouterSpec(num_experts=16, top_k=4, layers=(0, 1, 2)),
    "small": RouterSpec(num_experts=64, top_k=8, layers=tuple(range(10))),
    "one layer": RouterSpec(num_experts=8, top_k=1, layers=(3,)),
    "wide": RouterSpec(num_experts=320, top_k=6, layers=(1, 2, 3, 4)),
}


class Simulated:
    """Sequences with scores: bell-shaped, with favourite experts in each layer. `rounding` is that of an engine."""

    def __init__(
        self, spec: RouterSpec, seed: int, rounding: float = 0.03, sequences: int = 8, tokens: int = 40
    ) -> None:
        self.spec, self.rng, self.rounding = spec, np.random.default_rng(seed), rounding
        shape = (len(spec.layers), spec.num_experts)
        favourites = self.rng.normal(0, 0.7, shape)
        lengths = self.rng.integers(tokens // 2, tokens + 1, sequences)
        self.scores = [favourites + self.rng.normal(0, 1, (length, *shape)) for length in lengths]
        self.live = [self.choice(one) for one in self.scores]
        self.rounded = [self.choice(one, rounding) for one in self.scores]
        self.engine = [self.choice(one, rounding) for one in self.scores]
        self.captured = [np.arange(length) < length - 1 for length in lengths]

    def choice(self, scores: np.ndarray, rounding: float = 0.0) -> np.ndarray:
        noisy = scores + self.rng.normal(0, 1, scores.shape) * rounding if rounding else scores
        return np.argsort(-noisy, axis=-1)[..., : self.spec.top_k]

    def evidence(
        self,
        rows: list[np.ndarray] | None = None,
        versions: list[np.ndarray] | None = None,
        other: list[np.ndarray] | None = None,
    ) -> Evidence:
        given = self.engine if rows is None else rows
        variants = {"bfloat16": self.rounded}
        return Evidence.of(self.spec, given, self.captured, self.live, variants, versions, other)

    def with_fault(self, fault: str, seed: int = 0) -> list[np.ndarray]:
        if fault == "stale":
            return self.other_weights()
        return [inject(fault, ids, self.spec, seed) for ids in self.engine]

    def other_weights(self, size: float = 1.0) -> list[np.ndarray]:
        """The choice of routers whose scores differ by as much as noise of this size."""
        return [self.choice(one, size) for one in self.scores]
