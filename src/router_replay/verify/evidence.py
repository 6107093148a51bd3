"""What the rows of an engine are held against: the live choice of the trainer's routers for the same tokens.

The measure is the overlap: the share of the recorded experts that the live router chose too. It is near 1 for rows that
belong to their tokens. How near depends on the number types, so the same tokens go through the model in another number
type as well, and the overlap of these two passes is the level to expect. Rows of other tokens overlap by chance.

Shapes: N rows of all sequences together, L routed layers, K slots. Only captured rows are here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from router_replay.errors import MeasureError
from router_replay.spec import RouterSpec

GROSS = 0.5
"""A row or layer is suspect if its overlap is below this part of the way from chance to the expected level."""
SPARE = 0.02
"""Suspect rows beyond twice those of the other number type, as a share, that are still no fault."""
DRIFT = 0.01
"""Lost overlap beyond twice that of the other number type that is still put down to rounding."""
ERRORS = 4.0
"""Standard errors of the two means by which both may differ besides: few rows prove little."""


def overlap(rows_NLK: np.ndarray, other_NLK: np.ndarray) -> np.ndarray:
    """Return [N, L]: the share of the slots of `rows_NLK` whose expert is in the set of `other_NLK`."""
    shares = np.empty(rows_NLK.shape[:2])
    for start in range(0, len(rows_NLK), 4096):  # K * K comparisons per set, so a piece at a time
        a, b = rows_NLK[start : start + 4096], other_NLK[start : start + 4096]
        shares[start : start + 4096] = (a[..., :, None] == b[..., None, :]).any(axis=-1).mean(axis=-1)
    return shares


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """Hold the rows of an engine and the live choices for the same tokens, [N, L, K] each, as they came.

    `spec` is that of the model. `rows` are the recorded ids, which may be impossible ones. `live` is the choice of the
    trainer's routers, and `variants` the choice of the same model in other number types, by name. `sequences` [N] and
    `positions` [N] say to which token a row belongs. `versions` [N] are policy versions. `other` is the live choice of
    the checkpoint that is suspected, if one is.
    """

    spec: RouterSpec
    rows: np.ndarray
    live: np.ndarray
    variants: Mapping[str, np.ndarray]
    sequences: np.ndarray
    positions: np.ndarray
    versions: np.ndarray
    other: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        spec: RouterSpec,
        rows: Sequence[np.ndarray],
        captured: Sequence[np.ndarray],
        live: Sequence[np.ndarray],
        variants: Mapping[str, Sequence[np.ndarray]],
        versions: Sequence[np.ndarray] | None = None,
        other: Sequence[np.ndarray] | None = None,
    ) -> Evidence:
        """Make it from one array per sequence each; rows that are not `captured` are left out."""
        if not sum(int(mask.sum()) for mask in captured):
            raise MeasureError("no row is captured in any sequence: there is nothing to verify")

        def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
            chosen = [np.asarray(array)[mask] for array, mask in zip(arrays, captured, strict=True)]
            return np.concatenate(chosen).astype(np.int64)

        lengths = [len(mask) for mask in captured]
        return cls(
            spec,
            flat(rows),
            flat(live),
            {name: flat(arrays) for name, arrays in variants.items()},
            flat([np.full(length, number) for number, length in enumerate(lengths)]),
            flat([np.arange(length) for length in lengths]),
            flat(versions if versions is not None else [np.zeros(length, np.int64) for length in lengths]),
            None if other is None else flat(other),
        )

    @functools.cached_property
    def overlap(self) -> np.ndarray:
        """The overlap of rows and live choice, [N, L]."""
        return overlap(self.rows, self.live)

    @functools.cached_property
    def noise(self) -> np.ndarray:
        """The overlap of two number types of the trainer, [N, L]: of those that agree least with the live choice."""
        if not self.variants:
            return np.ones(self.rows.shape[:2])
        return min((overlap(one, self.live) for one in self.variants.values()), key=lambda share: float(share.mean()))

    @functools.cached_property
    def chance(self) -> np.ndarray:
        """The overlap of the rows with the live choice for other tokens, [L]."""
        return overlap(self.rows, np.roll(self.live, max(1, len(self.live) // 2), axis=0)).mean(axis=0)

    @property
    def expected(self) -> np.ndarray:
        """The overlap to expect of rows that belong to their tokens, [L]."""
        return self.noise.mean(axis=0)

    def _between(self, share: float) -> np.ndarray:
        """Return, [L], the overlap that lies this part of the way from chance to the expected level."""
        return self.chance + share * np.maximum(0, self.expected - self.chance)

    @functools.cached_property
    def suspect_rows(self) -> np.ndarray:
        """A mask [N] of rows that are nearer to chance, if there are more of them than rounding explains."""
        bar = float(self._between(GROSS).mean())
        found, by_noise = self.overlap.mean(axis=1) < bar, self.noise.mean(axis=1) < bar
        return found if _exceeds(found, by_noise, SPARE) else np.zeros(len(found), bool)

    @functools.cached_property
    def suspect_layers(self) -> np.ndarray:
        """A mask [L] of layers that are nearer to chance."""
        mask: np.ndarray = self.overlap.mean(axis=0) < self._between(GROSS)
        return mask

    @property
    def drifted(self) -> bool:
        """Whether more overlap is lost than rounding explains."""
        return _exceeds(1 - self.overlap.mean(axis=1), 1 - self.noise.mean(axis=1), DRIFT)

    @functools.cached_property
    def impossible(self) -> int:
        """The number of sets that no router can choose: an expert twice, or an id outside the model."""
        ordered = np.sort(self.rows, axis=2)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
        outside = ((self.rows < 0) | (self.rows >= self.spec.num_experts)).any(axis=2)
        return int((twice | outside).sum())

    @functools.cached_property
    def region(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows [N] and layers [L] that a hypothesis must explain: the suspect ones, or all.

        It is rows, if the layers are in order without the suspect rows; otherwise layers, if some are in order.
        """
        rows, layers = self.suspect_rows, self.suspect_layers
        if layers.any() and not layers.all():
            others = ~rows
            only_rows = (
                0.1 < others.mean() < 1
                and not (self.overlap[others][:, layers].mean(axis=0) < self._between(GROSS)[layers]).any()
            )
            if not only_rows:
                return np.ones(len(rows), bool), layers
        return (rows if rows.any() else np.ones(len(rows), bool)), np.ones(len(layers), bool)

    def explained(self, shares: np.ndarray, valid: np.ndarray | None = None) -> float:
        """Return how much of the lost overlap an explanation gives back, 1 for all of it.

        `shares` [N, L] is the overlap under the explanation, and `valid` [N, L] where it says something.
        """
        rows, layers = self.region
        inside = rows[:, None] & layers[None, :]
        if valid is not None:
            inside = inside & valid
        if not inside.any():
            return 0.0
        expected = float(np.broadcast_to(self.expected, shares.shape)[inside].mean())
        lost = expected - float(self.overlap[inside].mean())
        return 0.0 if lost <= 0 else 1 - max(0.0, expected - float(shares[inside].mean())) / lost


def _exceeds(found_N: np.ndarray, by_noise_N: np.ndarray, spare: float) -> bool:
    """Return whether the mean of `found_N` is above what noise explains: twice its mean, and the errors of both."""
    error = float(np.sqrt((found_N.var() + by_noise_N.var()) / len(found_N)))
    return float(found_N.mean()) > 2 * float(by_noise_N.mean()) + spare + ERRORS * error
