"""Decide how old what is trained may be: what may start, what is trained next, what is dropped, what is cancelled.

    policy = StrictBound(max_staleness=1, batch=32)      # groups per training step
    policy.admit(Load(version=3, ready=10, running=20))  # whether one more group may start
    policy.abort(running, version=4)                     # running groups that can no longer be trained
    policy.evict(ready, version=4)                       # finished groups that are too old
    policy.select(ready, version=4)                      # the groups of the next step, or none yet

The age of a token is the version that an update changes minus the version that sampled the token. All mini-batches of a
step update the same version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from router_replay.errors import ConfigError
from router_replay.rl.users_code import load

BUILT_IN = {
    "strict": "router_replay.rl.rollout.staleness:StrictBound",
    "admission": "router_replay.rl.rollout.staleness:Admission",
}
"""The short names of `asynchronous.staleness`, and the class of each."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Hold the load of the rollout side: the engine's `version`, the groups that wait (`ready`) and those `running`."""

    version: int
    ready: int
    running: int


class Aged(Protocol):
    """The attributes of a group that a policy reads."""

    @property
    def number(self) -> int:
        """The number of the group, in the order of admission."""

    @property
    def oldest(self) -> int | None:
        """The lowest version that its tokens can have; None if nothing of it was requested yet."""


class Admission:
    """Bound the age by what is started, as AReaL does: no group is started that would have to wait for too long.

    Groups may be started while (max_staleness + version + 1) * batch is above the number of groups that were trained,
    wait or run. `version * batch` of them were trained, so (max_staleness + 1) * batch may wait or run. The bound is
    not strict: a group that takes long is trained however old it is.

    `max_staleness` is the setting of that name; `batch` is the number of groups of a training step.
    """

    def __init__(self, max_staleness: int, batch: int) -> None:
        self.max_staleness, self.batch = max_staleness, batch

    def capacity(self, version: int) -> int:
        """Return how many groups may wait or run while the engine has this `version`."""
        return (self.max_staleness + 1) * self.batch

    def admit(self, now: Load) -> bool:
        """Return whether one more group may start under the load `now`."""
        return now.ready + now.running < self.capacity(now.version)

    def select(self, ready: Sequence[Aged], version: int) -> list[Aged]:
        """Return the groups of `ready` for the update of `version`, oldest first; empty if there are not enough."""
        if len(ready) < self.batch:
            return []
        return sorted(ready, key=lambda group: (_oldest(group, version), group.number))[: self.batch]

    def evict(self, ready: Sequence[Aged], version: int) -> list[Aged]:
        """Return the groups of `ready` that must not be trained by an update of `version`: none."""
        return []

    def abort(self, running: Sequence[Aged], version: int) -> list[Aged]:
        """Return the `running` groups that cannot be trained any more when the weights become `version`: none."""
        return []


class StrictBound(Admission):
    """Train no token that is older than `max_staleness` versions.

    Groups start as with `Admission`. What is too old is dropped when the version changes: groups that wait, and groups
    that still run, before the engine spends more on them.
    """

    def evict(self, ready: Sequence[Aged], version: int) -> list[Aged]:
        """Return the groups of `ready` with a token that is too old for an update of `version`."""
        return [group for group in ready if version - _oldest(group, version) > self.max_staleness]

    def abort(self, running: Sequence[Aged], version: int) -> list[Aged]:
        """Return the `running` groups with a token that no update from `version` on may train."""
        return self.evict(running, version)


def make_policy(name: str, max_staleness: int, batch: int) -> Admission:
    """Return the policy of the setting `asynchronous.staleness`: a short name, or `module:Class` for a class of yours.

    `max_staleness` and `batch` are those of the policy. Your class may extend `Admission` or `StrictBound`, or have the
    same methods.
    """
    made = load(BUILT_IN.get(name, name), "asynchronous.staleness", "class")(max_staleness, batch)
    missing = [method for method in ("capacity", "admit", "select", "evict", "abort") if not hasattr(made, method)]
    if missing:
        raise ConfigError(
            f"asynchronous.staleness = {name!r}: the class has no {', '.join(missing)}; extend "
            "router_replay.rl.rollout.staleness.StrictBound to inherit them"
        )
    return made


def _oldest(group: Aged, version: int) -> int:
    return version if group.oldest is None else group.oldest
