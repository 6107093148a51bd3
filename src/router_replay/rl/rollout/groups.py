"""Hold the groups of episodes that a stream of rollouts plays, and compute how old their tokens are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from router_replay.rl.rollout.player import Episode


@dataclasses.dataclass(eq=False)
class Play:
    """Hold what the stream knows of an episode in progress."""

    oldest: int | None = None
    """The lowest version that its tokens can have; None before its first request."""
    request: str | None = None
    """The id of the request that the engine is answering."""


@dataclasses.dataclass(eq=False)
class Group:
    """Hold the episodes of one problem. It is ready when all `size` of them are in `members`."""

    number: int
    problem: int
    size: int
    members: dict[int, Episode] = dataclasses.field(default_factory=dict)
    playing: dict[int, Play] = dataclasses.field(default_factory=dict)
    prompt: tuple[int, ...] | None = None
    dropped: bool = False
    ready_at: float = 0.0
    finished_oldest: int | None = None

    @property
    def oldest(self) -> int | None:
        """Return the lowest version that its tokens have or can have; None if nothing of it was requested yet."""
        known = [play.oldest for play in self.playing.values()] + [self.finished_oldest]
        return min((version for version in known if version is not None), default=None)

    @property
    def is_complete(self) -> bool:
        """Return whether all episodes have finished."""
        return len(self.members) == self.size

    def finish(self, member: int, episode: Episode) -> None:
        """Take a finished episode."""
        self.playing.pop(member, None)
        self.members[member] = episode
        versions = episode.versions
        if len(versions):
            lowest = int(versions.min())
            self.finished_oldest = lowest if self.finished_oldest is None else min(self.finished_oldest, lowest)


def version_figures(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """Return the metrics of a step that depend on the ages of its tokens, for an update of `version`."""
    ages = version - np.concatenate([episode.versions for episode in episodes])
    spans = [
        len(np.unique(np.asarray(one.versions)[one.loss_mask]))
        for episode in episodes
        for one in episode.trajectories
        if one.loss_mask.any()
    ]
    return {
        "async/staleness_mean": float(ages.mean()),
        "async/staleness_max": float(ages.max()),
        "async/versions_per_sample": float(np.mean(spans)),
    }
