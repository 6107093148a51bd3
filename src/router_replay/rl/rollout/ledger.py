"""Count every episode from its admission to its end: trained, dropped with a reason, or saved.

    ledger.admitted == ledger.trained + sum(ledger.dropped.values()) + finished + playing

`finished` episodes wait to be trained and are in the journal; `playing` ones are in progress.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from router_replay.errors import TrainError

Reason = Literal["stale", "no_signal", "interrupted", "environment"]
REASONS: tuple[Reason, ...] = ("stale", "no_signal", "interrupted", "environment")


@dataclasses.dataclass
class Ledger:
    """Hold the counts of a run, in episodes, over all its processes."""

    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def drop(self, reason: Reason, episodes: int) -> None:
        """Count dropped episodes."""
        self.dropped[reason] += episodes

    def open(self) -> int:
        """Return how many admitted episodes have neither been trained nor dropped."""
        return self.admitted - self.trained - sum(self.dropped.values())


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """Describe a group that was admitted and neither trained nor dropped.

    `size` is the number of its episodes. `alive` of them had finished or were playing when this was written.
    """

    number: int
    size: int
    alive: int


@dataclasses.dataclass(frozen=True)
class StreamState:
    """Hold what a checkpoint says of the rollouts: the counts, the next new group, and the groups that are open."""

    ledger: Ledger
    next_group: int
    open: tuple[OpenGroup, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the state as it stands in progress.json."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, saved: Any) -> Self:
        """Return the state that `saved`, the JSON of a checkpoint, holds; raise TrainError if it is not one."""
        try:
            groups = tuple(OpenGroup(**group) for group in saved["open"])
            return cls(Ledger(**saved["ledger"]), int(saved["next_group"]), groups)
        except (KeyError, TypeError, ValueError) as error:
            raise TrainError(
                f"the rollouts in progress.json of the checkpoint cannot be read ({error!r}): move this checkpoint "
                "away to use the one before it"
            ) from error
