"""Gather what the page shows of each row and token that `verify` compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router_replay.batch import Sample
from router_replay.report import Seen
from router_replay.verify.evidence import Evidence


def seen(
    evidence: Evidence,
    equal_NL: np.ndarray,
    samples: Sequence[Sample],
    live: Sequence[np.ndarray],
    replayed: Sequence[np.ndarray] | None,
) -> Seen:
    """Return the rows of `evidence`, of which `equal_NL` agree, and the log-probs of the tokens of `samples`.

    `live` and `replayed` have the trainer's log-probs of each sequence. The log-probs are left out if nothing was
    sampled.
    """
    spec = evidence.spec
    load_LE = np.zeros((len(spec.layers), spec.num_experts), np.int64)
    for column in range(len(spec.layers)):
        ids = evidence.rows[:, column].ravel()
        possible = ids[(ids >= 0) & (ids < spec.num_experts)]
        load_LE[column] = np.bincount(possible, minlength=spec.num_experts)
    rows = Seen(spec.layers, evidence.sequences, evidence.positions, ~equal_NL, load_LE)
    masks = [sample.loss_mask[1:] for sample in samples]
    if not sum(int(mask.sum()) for mask in masks):
        return rows

    def sampled(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(own)[mask] for own, mask in zip(arrays, masks, strict=True)])

    return Seen(
        rows.layers,
        rows.sequence,
        rows.position,
        rows.differs,
        rows.load,
        engine=sampled([sample.logprobs[1:] for sample in samples]).astype(np.float64),
        live=sampled(live).astype(np.float64),
        replayed=None if replayed is None else sampled(replayed).astype(np.float64),
        token_sequence=sampled([np.full(len(mask), number) for number, mask in enumerate(masks)]),
        token_position=sampled([np.arange(1, len(mask) + 1) for mask in masks]),
    )
