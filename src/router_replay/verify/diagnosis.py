"""Decide whether rows belong to their tokens, and name the likely cause if they do not."""

from __future__ import annotations

import dataclasses

import numpy as np

from router_replay.errors import shorten
from router_replay.verify.evidence import Evidence, overlap
from router_replay.verify.hypotheses import FAULTS

EXPLAINED = 0.7
"""A fault is named if taking it back gives back this part of the lost overlap."""
VERSIONS_APART = 0.05
HURTS = 1.5
"""Replay makes the log-probs worse if k3 grows by this factor: estimates from few tokens differ by chance."""
FAR = 0.05
"""A k3 after replay, in nats, that no rounding or quantization of the same weights leaves."""
OUT_OF_LINE = 0.3
"""A layer is out of line with the others if its agreement is below their median by this much."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault: its name, `fault`, the likely `cause` in words, and the `detail` that was seen."""

    fault: str
    cause: str
    detail: str


def diagnose(
    evidence: Evidence, k3: tuple[float, float] | None = None, followed: np.ndarray | None = None
) -> Finding | None:
    """Return the fault of the rows, or None if they belong to their tokens.

    `k3` are the log-prob gaps of the live and of the replayed pass, if there are log-probs. `followed` [L] is the share
    of rows on which each live router agreed while the layers before it were replayed, if rows could be replayed.

    Rows that are nearer to chance than to the expected level are a fault, and sets that no router can choose. Rows that
    only lost more overlap than rounding explains, as those of a quantized engine do, are one if a known fault explains
    it, if replay makes the log-probs worse, or if it leaves them far apart.
    """
    gross = bool(evidence.suspect_rows.any() or evidence.suspect_layers.any())
    hurts = k3 is not None and (k3[1] > HURTS * k3[0] or k3[1] > FAR)
    if not gross and not evidence.drifted and not evidence.impossible:
        return None
    tested = [(fault, *fault.test(evidence)) for fault in FAULTS]
    best, share, detail = max(tested, key=lambda one: one[1])
    if share >= EXPLAINED:
        return Finding(best.name, best.cause, f"{detail}{_where(evidence)}")
    if gross or (evidence.drifted and hurts):
        return _unexplained(evidence, followed)
    if evidence.impossible:
        detail = f"{evidence.impossible} sets repeat an expert, or hold an id outside [0, {evidence.spec.num_experts})"
        return Finding("impossible", "the ids were damaged on their way, or belong to another model", detail)
    return None


def _unexplained(evidence: Evidence, followed: np.ndarray | None) -> Finding:
    """Name a fault that nothing takes back by where it is and how much overlap is left."""
    layers = len(evidence.spec.layers)
    few = evidence.region[1] if not evidence.region[1].all() else np.zeros(layers, bool)
    if followed is not None and 0 < (low := followed < np.median(followed) - OUT_OF_LINE).sum() <= layers / 4:
        few = low
    if 0 < few.sum() <= layers / 4:
        return Finding(
            "one-layer",
            "an expert-parallel bug, or a kernel of its own, in the router of this layer",
            f"only {_layers(evidence, few)} out of line",
        )
    columns = evidence.region[1]
    left = float(evidence.overlap[_wholly_suspect(evidence)][:, columns].mean())
    chance, expected = float(evidence.chance[columns].mean()), float(evidence.expected[columns].mean())
    detail = (
        f"overlap {left:.2f}, expected {expected:.2f}, by chance {chance:.2f}{_where(evidence) or by_version(evidence)}"
    )
    if left - chance < 0.15 * (expected - chance) and not _bad_versions(evidence):
        return Finding("other-tokens", "the rows are those of other tokens, or of another model", detail)
    advice = "" if evidence.other is not None else "; --against PATH tests a checkpoint"
    return Finding(
        "stale", f"the rows were routed by other weights: before a weight swap, or another checkpoint{advice}", detail
    )


def _wholly_suspect(evidence: Evidence) -> np.ndarray:
    """Return a mask of the rows of sequences that are suspect as a whole; of all rows if there is no such sequence.

    The suspect rows alone would be those with the least overlap, by selection.
    """
    suspect, sequences = evidence.suspect_rows, evidence.sequences
    shares = np.bincount(sequences, suspect) / np.maximum(1, np.bincount(sequences))
    chosen = (shares > 0.8)[sequences]
    return chosen if chosen.any() else np.ones(len(suspect), bool)


def _where(evidence: Evidence) -> str:
    """Say which layers or rows are affected, if these are not all."""
    suspect, layers = evidence.suspect_rows, evidence.region[1]
    if not layers.all():
        return f"; in {_layers(evidence, layers)} only"
    if not suspect.any() or suspect.mean() > 0.9:
        return ""
    if bad := _bad_versions(evidence):
        return f"; in the rows of policy version {shorten(bad)}"
    numbers = np.unique(evidence.sequences[suspect]).tolist()
    return f"; in {int(suspect.sum())} of {len(suspect)} rows, of sequences {shorten(numbers)}"


def _bad_versions(evidence: Evidence) -> list[int]:
    """Return the policy versions whose rows are suspect, if those of the others are not; none if it is all of them."""
    suspect, versions = evidence.suspect_rows, evidence.versions
    shares = {int(version): float(suspect[versions == version].mean()) for version in np.unique(versions)}
    bad = [version for version, share in shares.items() if share > 0.8]
    good = [version for version, share in shares.items() if share < 0.2]
    return bad if good and len(bad) + len(good) == len(shares) else []


def by_version(evidence: Evidence) -> str:
    """Say how much the rows of each policy version overlap with the live choice, if the versions differ in it."""
    shares = {int(v): float(evidence.overlap[evidence.versions == v].mean()) for v in np.unique(evidence.versions)}
    if max(shares.values()) - min(shares.values()) < VERSIONS_APART:
        return ""
    return f"; by policy version: {shorten([f'{version}: {share:.2f}' for version, share in shares.items()])}"


def _layers(evidence: Evidence, mask: np.ndarray) -> str:
    names = np.array(evidence.spec.layers)[mask].tolist()
    return f"{'layer' if len(names) == 1 else 'layers'} {shorten(names, 8)}"


def nearer_precision(evidence: Evidence) -> str | None:
    """Return the number type with which the rows agree clearly better than with the trainer's, or None."""
    lost = float(1 - evidence.overlap.mean())
    losses = {name: float(1 - overlap(evidence.rows, one).mean()) for name, one in evidence.variants.items()}
    if not losses or lost < 1e-3:
        return None
    name = min(losses, key=lambda one: losses[one])
    return name if losses[name] < lost / 2 else None
