"""The faults that rows can have. Each is tested by taking it back and looking whether the live routers then agree.

    for fault in FAULTS:
        share, detail = fault.test(evidence)      # share: how much of the lost overlap it explains

A fault is a function on the arrays of an Evidence, in one table. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from router_replay.verify.evidence import Evidence, overlap

FARTHEST_SHIFT = 4
WHOLE_COLUMN = 0.9
Tested = tuple[float, str]
NOTHING: Tested = (0.0, "")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: its `name`, the likely `cause` in words, and the function that tests it.

    `test` returns how much of the lost overlap the fault explains, at most 1, and what was found.
    """

    name: str
    cause: str
    test: Callable[[Evidence], Tested]


def zero(evidence: Evidence) -> Tested:
    """Sets of zeros where the live router chose others: nothing was captured there.

    With one expert per token a zero can be a choice, so only a column of zeros counts.
    """
    rows, layers = evidence.region
    zeros_NL = (evidence.rows == 0).all(axis=2)
    if evidence.spec.top_k == 1:
        zeros_NL &= zeros_NL[rows].mean(axis=0) > WHOLE_COLUMN
    zeros_NL &= (evidence.live != 0).any(axis=2)
    inside = rows[:, None] & layers[None, :]
    lost_NL = (evidence.overlap < 1) & inside
    if not lost_NL.any():
        return NOTHING
    share = float(zeros_NL[inside].sum() / lost_NL.sum())
    return min(1.0, share), f"{zeros_NL[inside].sum():,} sets hold only zeros"


def shift(evidence: Evidence) -> Tested:
    """The row of a token stands at another position of its sequence."""
    best = NOTHING
    width = int(evidence.positions.max()) + FARTHEST_SHIFT + 1
    place_N = evidence.sequences * (width + FARTHEST_SHIFT) + evidence.positions
    for by in (step for size in range(1, FARTHEST_SHIFT + 1) for step in (size, -size)):
        # Row i holds the experts of token i - by, if rows are late by that many tokens.
        at = np.searchsorted(place_N, place_N - by)
        same = (at < len(place_N)) & (place_N[np.minimum(at, len(place_N) - 1)] == place_N - by)
        shares = overlap(evidence.rows, evidence.live[np.minimum(at, len(place_N) - 1)])
        share = evidence.explained(shares, np.broadcast_to(same[:, None], shares.shape))
        if share > best[0]:
            which = "before" if by > 0 else "after"
            best = share, f"a row holds the experts of the token {abs(by)} {which} its own"
    return best


def layer_offset(evidence: Evidence) -> Tested:
    """A column holds the experts of another layer."""
    best = NOTHING
    layers = len(evidence.spec.layers)
    for by in (step for size in range(1, layers) for step in (size, -size)):
        columns = np.arange(layers) - by
        inside = (columns >= 0) & (columns < layers)
        shares = overlap(evidence.rows, evidence.live[:, np.clip(columns, 0, layers - 1)])
        share = evidence.explained(shares, np.broadcast_to(inside[None, :], shares.shape))
        # An offset that compares few columns must explain as much as one that compares all.
        share *= float(inside.mean()) ** 0.25
        if share > best[0]:
            best = share, f"column i holds the routed layer {abs(by)} {'before' if by > 0 else 'after'} its own"
    return best


def permuted_experts(evidence: Evidence) -> Tested:
    """The experts of a layer have other numbers: physical ids in place of logical ones.

    The numbers are matched on every second row, and the match is judged on the others.
    """
    experts, (rows, layers) = evidence.spec.num_experts, evidence.region
    if evidence.rows.min() < 0 or evidence.rows.max() >= experts:
        return NOTHING
    fitted = rows & (np.cumsum(rows) % 2 == 0)
    judged = rows & ~fitted
    shares, moved = evidence.overlap.copy(), 0
    for column in np.flatnonzero(layers):
        mapping = _matched(evidence.rows[fitted, column], evidence.live[fitted, column], experts)
        moved += int((mapping != np.arange(experts)).sum())
        renamed = mapping[evidence.rows[:, column]]
        shares[:, column] = overlap(renamed[:, None], evidence.live[:, column, None])[:, 0]
    share = evidence.explained(shares, np.broadcast_to(judged[:, None], shares.shape))
    return share, f"{moved / max(1, int(layers.sum())):.0f} experts of a layer have the number of another one"


def _matched(rows_NK: np.ndarray, live_NK: np.ndarray, experts: int) -> np.ndarray:
    """Return for each recorded number the live expert that occurs with it most, each expert once."""
    chosen, used = (np.zeros((len(rows_NK), experts), np.float32) for _ in range(2))
    np.put_along_axis(chosen, rows_NK, 1, axis=1)
    np.put_along_axis(used, live_NK, 1, axis=1)
    together = chosen.T @ used
    size = np.sqrt(np.outer(chosen.sum(axis=0), used.sum(axis=0)))
    likeness = together / np.maximum(size, 1)
    mapping = np.arange(experts)
    free, left = np.ones(experts, bool), np.ones(experts, bool)
    for pair in np.argsort(-likeness, axis=None, kind="stable"):
        recorded, expert = divmod(int(pair), experts)
        if likeness[recorded, expert] <= 0:
            break
        if left[recorded] and free[expert]:
            mapping[recorded], left[recorded], free[expert] = expert, False, False
    mapping[left] = np.flatnonzero(free)[: int(left.sum())]
    return mapping


def cast(evidence: Evidence) -> Tested:
    """Ids above 255 were cut to a byte."""
    if evidence.spec.num_experts <= 256 or evidence.rows.max() > 255:
        return NOTHING
    share = evidence.explained(overlap(evidence.rows, evidence.live & 255))
    return share, "no id is above 255, and the live ids cut to a byte agree"


def stale(evidence: Evidence) -> Tested:
    """The checkpoint that is suspected agrees."""
    if evidence.other is None:
        return NOTHING
    return evidence.explained(overlap(evidence.rows, evidence.other)), "the routers of the suspected checkpoint agree"


FAULTS: tuple[Fault, ...] = (
    Fault("zero", "the engine captured nothing there: its hook did not run, or capture is off", zero),
    Fault("cast", "expert ids were stored in one byte, and this model has more than 256 experts", cast),
    Fault("shift", "rows and tokens are out of step: a row was lost or doubled at a boundary", shift),
    Fault("layer-offset", "columns were read as other layers, as when dense layers are not counted", layer_offset),
    Fault("stale", "the engine routed with the weights of the suspected checkpoint", stale),
    Fault("permuted-experts", "the ids are physical ones, after expert load balancing", permuted_experts),
)
