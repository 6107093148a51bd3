"""Stats counts what a RouterReplay has done so far, as evidence that replay was active."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from router_replay.replay.state import Plan

COUNTS_OF_ALL_LAYERS = 3  # in `Stats.counts`: passes, rows compared, ambiguous sequences


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums the counts of all forward passes under replay. Tuples have one entry per routed layer.

    `layers` are the ids of the routed layers, `passes` is the number of forward passes. `rows_replayed` counts the rows
    whose recorded experts were used; it is the same in every layer, because a pass in which a router did not use its
    column raises.

    `rows_live` counts the rows that were missing and routed live. If the replayer was given a batch, it knows the
    labels and does not count rows that predict nothing: padding, and the last token of each sequence, which no engine
    forwards. `agreement` is the share of replayed rows whose set of experts equals the choice of the live router; it
    is None unless it was requested. `rows_compared` is the number of rows behind that share. `sequences_ambiguous`
    counts the sequences of `follow` blocks whose tokens fit several samples with different rows.
    """

    layers: tuple[int, ...]
    passes: int
    rows_replayed: tuple[int, ...]
    rows_live: tuple[int, ...]
    agreement: tuple[float, ...] | None
    rows_compared: int = 0
    sequences_ambiguous: int = 0

    @classmethod
    def live(cls, layers: tuple[int, ...], rows: int) -> Stats:
        """Return the Stats of one pass without replay, in which all `rows` were routed live in all `layers`."""
        return cls(layers, 1, (0,) * len(layers), (rows,) * len(layers), None)

    @classmethod
    def compared(cls, layers: tuple[int, ...], rows: int, agreement: Sequence[float]) -> Stats:
        """Return the Stats of a comparison of `rows` rows outside a pass, with the `agreement` of each of `layers`."""
        nothing = (0,) * len(layers)
        return cls(layers, 0, nothing, nothing, tuple(agreement), rows)

    def __add__(self, other: Stats) -> Stats:
        return Stats.from_counts(self.layers, [a + b for a, b in zip(self.counts(), other.counts(), strict=True)])

    def counts(self) -> list[int]:
        """Return integers that can be summed over ranks; `from_counts` converts the sums to Stats.

        The first `COUNTS_OF_ALL_LAYERS` are those of the whole model; then come three for each layer.
        """
        agreement = self.agreement or (0.0,) * len(self.layers)
        agreed = [round(share * self.rows_compared) for share in agreement]
        return [
            self.passes,
            self.rows_compared,
            self.sequences_ambiguous,
            *self.rows_replayed,
            *self.rows_live,
            *agreed,
        ]

    @classmethod
    def from_counts(cls, layers: tuple[int, ...], counts: Sequence[int]) -> Stats:
        """Convert `counts`, the result of `counts()` or a sum of several, to the Stats of these `layers`."""
        passes, compared, ambiguous, *rest = counts
        width = len(layers)
        replayed, live, agreed = (tuple(rest[i * width : (i + 1) * width]) for i in range(3))
        agreement = tuple(count / compared for count in agreed) if compared else None
        return cls(layers, passes, replayed, live, agreement, compared, ambiguous)

    def since(self, before: Stats) -> Stats:
        """Return the difference to the earlier Stats `before`, for example the counts of one training step."""
        return Stats.from_counts(self.layers, [a - b for a, b in zip(self.counts(), before.counts(), strict=True)])


class Counters:
    """Sums the counts of plans for the routed `layers`.

    A sum may be a tensor that is not computed yet; only `read` waits for the device.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.sums: list[Any] = [0, 0, 0, 0]  # passes, rows replayed, rows live, rows compared
        self.agree_L: Any = None
        self.open: list[Plan] = []
        self.ambiguous = 0

    @contextlib.contextmanager
    def counting(self, plan: Plan) -> Iterator[None]:
        """Include `plan` in the counts while its block is open, then keep only its sums and release its routes."""
        self.open.append(plan)
        try:
            yield
        finally:
            self.open.remove(plan)
            self.add(plan)

    def add(self, plan: Plan) -> None:
        """Add the counts of a plan whose passes are over."""
        self.sums, self.agree_L = _add(self.sums, self.agree_L, plan)

    def add_live(self, rows: int) -> None:
        """Add a pass for which no row was found: all of its `rows` were routed live."""
        self.sums = [self.sums[0] + 1, self.sums[1], self.sums[2] + rows, self.sums[3]]

    def read(self) -> Stats:
        """Return the sums so far, those of open blocks included. This waits for the device."""
        sums, agree_L = self.sums, self.agree_L
        for plan in self.open:
            sums, agree_L = _add(sums, agree_L, plan)
        passes, replayed, live, compared = (int(value) for value in sums)
        width = len(self.layers)
        agreement = None
        if agree_L is not None and compared:
            agreement = tuple(count / compared for count in agree_L.tolist())
        return Stats(self.layers, passes, (replayed,) * width, (live,) * width, agreement, compared, self.ambiguous)


def _add(sums: list[Any], agree_L: Any, plan: Plan) -> tuple[list[Any], Any]:
    passes: Any = plan.passes
    if plan.was_compiled:  # otherwise the sums need no kernels
        passes = passes + plan.compiled_passes
    asked = plan.agree_L is not None
    more = (passes, passes * plan.rows_replayed, passes * plan.rows_live, passes * plan.rows_replayed * asked)
    if asked:
        agree_L = plan.agree_L if agree_L is None else agree_L + plan.agree_L
    return [old + new for old, new in zip(sums, more, strict=True)], agree_L
