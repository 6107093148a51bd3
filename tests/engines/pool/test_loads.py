"""The least busy engine: always the one that a look at all of them would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router_replay.engines.pool.loads import Loads

KEYS = "abcde"


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 4), st.booleans()), max_size=400))
def test_the_least_busy_key_is_the_one_that_was_used_longest_ago(steps: list[tuple[str, int, bool]]) -> None:
    loads = Loads(KEYS)
    running, used = dict.fromkeys(KEYS, 0), {key: number - len(KEYS) for number, key in enumerate(KEYS)}
    flights: list[tuple[str, int]] = []
    for time, (key, samples, lands) in enumerate(steps):
        if lands and flights:
            key, samples = flights.pop(0)
            samples = -samples
        else:
            flights.append((key, samples))
            used[key] = time
        running[key] += samples
        loads.add(key, samples)
        expected = min(KEYS, key=lambda one: (running[one], used[one]))
        assert loads.least() == (expected, running[expected])
        assert {one: loads.of(one) for one in KEYS} == running
    assert len(loads._heap) <= 8 * len(KEYS) + 64
