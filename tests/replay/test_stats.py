"""Stats of passes add up, over passes and over ranks, and come apart again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router_replay.replay.stats import Stats

LAYERS = (1, 3)
counts = st.integers(0, 10**6)


@st.composite
def stats(draw: st.DrawFn) -> Stats:
    compared = draw(counts)
    agreed = [draw(st.integers(0, compared)) for _ in LAYERS]
    replayed, live = draw(counts), draw(counts)
    return Stats.from_counts(LAYERS, [draw(counts), compared, *[replayed] * 2, *[live] * 2, *agreed, draw(counts)])


@given(a=stats(), b=stats())
def test_what_was_added_is_what_came_since(a: Stats, b: Stats) -> None:
    assert (a + b).since(a) == b
    assert (a + b).counts() == [x + y for x, y in zip(a.counts(), b.counts(), strict=True)]
    assert Stats.from_counts(LAYERS, a.counts()) == a


def test_a_pass_without_replay_and_a_comparison_beside_one_are_told_apart() -> None:
    found = Stats.live(LAYERS, 10) + Stats.compared(LAYERS, 4, [0.5, 1.0]) + Stats.live(LAYERS, 10)
    assert found == Stats(LAYERS, 2, (0, 0), (20, 20), (0.5, 1.0), 4)
    assert (Stats.live(LAYERS, 1) + Stats.live(LAYERS, 1)).agreement is None
