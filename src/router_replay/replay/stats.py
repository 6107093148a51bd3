"""What a RouterReplay has done so far: the proof that replay was on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from router_replay.replay.state import Plan


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums over every forward pass under replay. One entry per routed layer where there is a list.

    A pass in which a router did not use its column raises, so every layer replays the same number of rows.
    `agreement` is the share of replayed rows whose set of experts is what the live router would have chosen;
    None unless it was asked for. `rows_compared` is what it is a share of.
    """

    layers: tuple[int, ...]
    passes: int
    rows_replayed: tuple[int, ...]
    rows_live: tuple[int, ...]
    agreement: tuple[float, ...] | None
    rows_compared: int = 0

    def since(self, before: Stats) -> Stats:
        """What was added after `before` was read: the figures of one training step."""
        compared = self.rows_compared - before.rows_compared
        agreement = None
        if compared and self.agreement is not None:
            old = before.agreement or (0.0,) * len(self.layers)
            pairs = zip(self.agreement, old, strict=True)
            agreement = tuple((new * self.rows_compared - was * before.rows_compared) / compared for new, was in pairs)
        return Stats(
            self.layers,
            self.passes - before.passes,
            tuple(new - was for new, was in zip(self.rows_replayed, before.rows_replayed, strict=True)),
            tuple(new - was for new, was in zip(self.rows_live, before.rows_live, strict=True)),
            agreement,
            compared,
        )


class Counters:
    """Adds plans up. A sum may be a tensor that has not been computed yet; only `read` waits for the device."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.sums: list[Any] = [0, 0, 0, 0]  # passes, rows replayed, rows live, rows compared
        self.agree_L: Any = None
        self.open: list[Plan] = []

    @contextlib.contextmanager
    def counting(self, plan: Plan) -> Iterator[None]:
        """Count a plan while its block is open. Afterwards keep its sums and let its routes go."""
        self.open.append(plan)
        try:
            yield
        finally:
            self.open.remove(plan)
            self.sums, self.agree_L = _add(self.sums, self.agree_L, plan)

    def read(self) -> Stats:
        sums, agree_L = self.sums, self.agree_L
        for plan in self.open:
            sums, agree_L = _add(sums, agree_L, plan)
        passes, replayed, live, compared = (int(value) for value in sums)
        width = len(self.layers)
        agreement = None
        if agree_L is not None and compared:
            agreement = tuple(count / compared for count in agree_L.tolist())
        return Stats(self.layers, passes, (replayed,) * width, (live,) * width, agreement, compared)


def _add(sums: list[Any], agree_L: Any, plan: Plan) -> tuple[list[Any], Any]:
    passes: Any = plan.passes
    if plan.compiled_passes is not None:
        passes = passes + plan.compiled_passes
    asked = plan.agree_L is not None
    more = (passes, passes * plan.rows_replayed, passes * plan.rows_live, passes * plan.rows_replayed * asked)
    if asked:
        agree_L = plan.agree_L if agree_L is None else agree_L + plan.agree_L
    return [old + new for old, new in zip(sums, more, strict=True)], agree_L
