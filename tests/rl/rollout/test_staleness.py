"""The two rules of staleness, and one's own."""

from __future__ import annotations

import dataclasses

import pytest

from router_replay.errors import ConfigError
from router_replay.rl.rollout.staleness import Admission, Load, StrictBound, make_policy


@dataclasses.dataclass
class One:
    number: int
    oldest: int | None


def test_groups_are_admitted_as_long_as_they_can_be_trained_in_time() -> None:
    """(max_staleness + version + 1) * batch - (trained + waiting + running), with version * batch trained."""
    policy = Admission(max_staleness=2, batch=4)
    for version in (0, 5):
        assert policy.admit(Load(version, ready=4, running=7))
        assert not policy.admit(Load(version, ready=4, running=8))


def test_without_staleness_only_the_groups_of_the_running_step_are_admitted() -> None:
    policy = StrictBound(max_staleness=0, batch=3)
    assert policy.admit(Load(0, ready=0, running=2))
    assert not policy.admit(Load(0, ready=3, running=0))  # they are being trained


def test_the_strict_bound_drops_what_is_too_old_and_the_other_rule_does_not() -> None:
    groups = [One(0, 3), One(1, 4), One(2, None), One(3, 5)]
    strict = StrictBound(max_staleness=1, batch=2)
    assert [group.number for group in strict.evict(groups, version=5)] == [0]
    assert [group.number for group in strict.abort(groups, version=6)] == [0, 1]
    assert not Admission(1, 2).evict(groups, 9)
    assert not Admission(1, 2).abort(groups, 9)


def test_the_oldest_groups_are_trained_first() -> None:
    policy = StrictBound(max_staleness=4, batch=2)
    ready = [One(3, 5), One(1, 6), One(2, 5), One(0, 6)]
    assert [group.number for group in policy.select(ready, 6)] == [2, 3]
    assert policy.select(ready[:1], 6) == []


class Own(StrictBound):
    """Lets twice as much in."""

    def capacity(self, version: int) -> int:
        return 2 * super().capacity(version)


class Half:
    def __init__(self, max_staleness: int, batch: int) -> None: ...

    def admit(self, now: Load) -> bool:
        return True


def test_a_rule_of_ones_own_is_loaded_by_name_and_must_be_whole() -> None:
    policy = make_policy(f"{__name__}:Own", 1, 4)
    assert policy.capacity(0) == 16
    assert isinstance(make_policy("strict", 1, 4), StrictBound)
    assert type(make_policy("admission", 1, 4)) is Admission
    with pytest.raises(ConfigError, match="the class has no capacity, select, evict, abort"):
        make_policy(f"{__name__}:Half", 1, 4)
    with pytest.raises(ConfigError, match=r"asynchronous\.staleness"):
        make_policy("no_such_module:Rule", 1, 4)
