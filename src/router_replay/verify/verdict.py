"""The verdict of `router-replay verify`: its numbers, as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from router_replay.number_format import Kind, number
from router_replay.report import Seen
from router_replay.verify.diagnosis import Finding
from router_replay.verify.split import Split

_SHOWN: tuple[tuple[str, str, Kind], ...] = (
    ("k3", "k3", "small"),
    ("extreme tokens, F(2)", "extreme", "share"),
    ("mean |log-prob gap|", "abs_mean", "small"),
)


@dataclasses.dataclass(frozen=True)
class Gap:
    """The log-prob gap of engine and trainer: `k3`, the share of `extreme` tokens F(2), and `abs_mean`, mean |d|."""

    k3: float
    extreme: float
    abs_mean: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was seen. `finding` is None if the routes belong to the tokens.

    `seen` is what the page shows of each token; the JSON does not have it.

    `model` is the trainer's model and `dtype` its number type. `source` is where tokens and rows came from.
    `sequences`, `sampled` and `rows` count sequences, sampled tokens and captured rows. `missing` counts uncaptured
    rows, and `missing_loss` those of them that predict a sampled token. `impossible` counts sets that no router can
    choose. `disagree` is the share of (row, layer) pairs whose sets differ from the live choice, `per_layer` the same
    by layer id, `tokens_disagree` the share of rows with any difference, and `expected` the share of pairs that differ
    between two number types of the trainer. `live` and `replayed` are the log-prob gaps; None if there are no
    log-probs, or if the rows cannot be replayed. `split` divides the k3 that remains; None if there is none, or if the
    rows have a fault. `notes` are further facts.
    """

    model: str
    source: str
    dtype: str
    sequences: int
    sampled: int
    rows: int
    missing: int
    missing_loss: int
    impossible: int
    disagree: float
    tokens_disagree: float
    expected: float
    per_layer: dict[int, float]
    live: Gap | None
    replayed: Gap | None
    split: Split | None
    finding: Finding | None
    notes: tuple[str, ...] = ()
    seen: Seen | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def belongs(self) -> bool:
        """Whether the routes belong to the tokens."""
        return self.finding is None

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        facts = dataclasses.asdict(self)
        if self.split is not None:
            facts["split"]["how"] = self.split.how
        facts["per_layer"] = {str(layer): share for layer, share in self.per_layer.items()}
        del facts["seen"]
        return {"belongs": self.belongs, **facts}

    def as_text(self) -> list[str]:
        """Return the lines of the terminal, the verdict first."""
        if self.finding is None:
            lines = ["The routes belong to the tokens."]
        else:
            lines = [f"FAULT {self.finding.fault}: {self.finding.cause}.", f"  {self.finding.detail}"]
        lines += [
            f"{self.source}; trainer {self.model} in {self.dtype}",
            f"{self.sequences} sequences, {self.sampled:,} sampled tokens, {self.rows:,} rows; {self.missing:,} rows "
            f"missing ({self.missing_loss:,} of them bear loss), {self.impossible:,} impossible sets",
            f"routers that disagree   {number(self.disagree, 'share')}, where two number types of the trainer disagree "
            f"on {number(self.expected, 'share')}",
            f"tokens with any of them {number(self.tokens_disagree, 'share')}",
        ]
        if self.live is not None:
            lines.append("                        live      replayed")
            for name, field, kind in _SHOWN:
                after = None if self.replayed is None else getattr(self.replayed, field)
                lines.append(f"{name:<24}{number(getattr(self.live, field), kind):<10}{number(after, kind)}")
        if self.split is not None:
            lines += _split_lines(self.split)
        worst = sorted(self.per_layer.items(), key=lambda one: -one[1])[:5]
        shown = ", ".join(f"layer {layer}: {number(share, 'share')}" for layer, share in worst)
        return [*lines, f"layers that disagree most: {shown}", *(f"note: {note}" for note in self.notes)]


def _split_lines(split: Split) -> list[str]:
    if split.gates is None:
        return [f"what remains            not split: {split.why_not}"]
    error = "" if split.error is None else f" (± {number(split.error, 'share')})"
    shares = f"gate weights {number(split.gates, 'share')}, the rest of the arithmetic {number(split.rest, 'share')}"
    return [f"what remains of k3      {shares}{error}", f"  {split.how}"]
