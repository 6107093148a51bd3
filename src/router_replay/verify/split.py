"""Estimate how much of the log-prob gap that remains after replay the gate weights cause, and how much the rest.

An engine returns the experts that it used and not their weights, so the trainer cannot compute with the engine's gate
weights. It can do so between two of its own passes. In float32 and in bfloat16, with the engine's experts in both, the
log-probs are some k3 apart; with the gate weights of float32 in the bfloat16 pass too, they are less far apart. What is
left then is the rest of the arithmetic, and the difference is the gate weights. What remains between engine and trainer
is put down to both in the same proportion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from router_replay.batch import Sample
from router_replay.measure import logprob_gap
from router_replay.number_format import number
from router_replay.routes import Routes
from router_replay.verify.gates import RouterOutputs
from router_replay.verify.passes import Trainer

MOST_TOKENS = 4096
"""The split is made on the first sequences with so many tokens together: gate weights are kept in memory."""
FEW_SEQUENCES = 4
"""With fewer sequences than this, there is no standard error."""
NEAR = (0.03, 30.0)
"""What remains is put down to arithmetic if it is this many times the k3 of the trainer's number types."""


@dataclasses.dataclass(frozen=True)
class Split:
    """What remains after replay, divided. `gates` and `rest` are shares that sum to 1; None if `why_not` says why.

    `error` is the standard error of both, by drawing other sequences; None if there are too few. `number_types` is the
    k3 between the trainer's passes in float32 and in bfloat16 with the engine's experts, `equal_gates` the same with
    equal gate weights, over `tokens` sampled tokens.
    """

    gates: float | None
    rest: float | None
    error: float | None
    number_types: float
    equal_gates: float
    tokens: int
    why_not: str = ""

    @property
    def how(self) -> str:
        """How the shares were determined, in words."""
        return (
            "an estimate from the trainer's own passes with the engine's experts: in float32 and bfloat16 they are "
            f"k3 {number(self.number_types, 'small')} apart, and {number(self.equal_gates, 'small')} with equal gate "
            f"weights ({self.tokens:,} tokens); an engine does not return the gate weights that it used"
        )


class Splitting:
    """Makes the passes for a Split in between those of verify: first `in_float32`, then `in_bfloat16`.

    `samples` are the sequences, and `routes` their rows.
    """

    def __init__(self, trainer: Trainer, samples: Sequence[Sample], routes: Sequence[Routes]) -> None:
        ends = np.cumsum([len(sample) for sample in samples])
        count = max(1, int((ends <= MOST_TOKENS).sum()))
        self._trainer, self._samples, self._routes = trainer, samples[:count], routes[:count]
        self._masks = [sample.loss_mask[1:] for sample in self._samples]
        self.why_not = trainer.why_not_gates
        if not self.why_not and not sum(int(mask.sum()) for mask in self._masks):
            self.why_not = "no token was sampled"
        self._kept: RouterOutputs | None = None
        self._float32: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._samples)

    def in_float32(self, tick: Callable[[], object]) -> None:
        """Run the pass in float32, and keep its gate weights."""
        self._kept = self._trainer.gates()
        self._float32 = self._sampled(self._trainer.replayed(self._samples, self._routes, tick, keep=self._kept)[0])

    def in_bfloat16(self, tick: Callable[[], object]) -> Split:
        """Run both passes in bfloat16, and return what they show."""
        own = self._sampled(self._trainer.replayed(self._samples, self._routes, lambda: None)[0])
        equal = self._sampled(self._trainer.replayed(self._samples, self._routes, tick, give=self._kept)[0])
        self._kept = None
        return split_of(_k3_sums(own, self._float32), _k3_sums(equal, self._float32), sum(map(len, own)))

    def _sampled(self, logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [own[mask] for own, mask in zip(logprobs, self._masks, strict=True) if mask.any()]


def _k3_sums(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of the k3 terms of each sequence."""
    return np.array([logprob_gap(a, b).k3 * len(a) for a, b in zip(one, other, strict=True)])


def split_of(number_types: np.ndarray, equal_gates: np.ndarray, tokens: int) -> Split:
    """Return the Split of two sums of k3 per sequence: between two number types, and with equal gate weights.

    `tokens` is the number of tokens of all sequences.
    """
    apart, equal = float(number_types.sum()), float(equal_gates.sum())
    means = apart / tokens, equal / tokens, tokens
    if not apart > 0:
        return Split(None, None, None, *means, "float32 and bfloat16 give the same log-probs")
    rest = min(1.0, equal / apart)
    return Split(1 - rest, rest, _error(number_types, equal_gates), *means)


def _error(number_types: np.ndarray, equal_gates: np.ndarray) -> float | None:
    """Return the standard error of the share, from sequences that are drawn again with repeats."""
    count = len(number_types)
    if count < FEW_SEQUENCES:
        return None
    drawn = np.random.default_rng(0).integers(count, size=(500, count))
    apart = number_types[drawn].sum(axis=1)
    shares = np.minimum(1.0, equal_gates[drawn].sum(axis=1)[apart > 0] / apart[apart > 0])
    return float(shares.std())


def fitting(split: Split, remains: float) -> Split:
    """Return the `split` for a k3 that `remains` after replay, without shares if it is not of rounding alone."""
    if split.why_not:
        return split
    low, high = (share * split.number_types for share in NEAR)
    if low <= remains <= high:
        return split
    size = "less" if remains < low else "more"
    why_not = f"what remains is far {size} than what float32 and bfloat16 differ by, so it is not of that rounding"
    return dataclasses.replace(split, gates=None, rest=None, error=None, why_not=why_not)
