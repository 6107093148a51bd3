"""The engine of the longest known beginning of a prompt is found, and old beginnings are forgotten."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from router_replay.engines.pool.prefixes import BLOCK, PrefixMap

prompts = st.lists(st.integers(0, 2), max_size=4 * BLOCK)


@given(st.lists(st.tuples(prompts, st.sampled_from("abc")), max_size=8), prompts)
def test_the_longest_known_beginning_wins(history: list[tuple[list[int], str]], prompt: list[int]) -> None:
    prefixes = PrefixMap()
    for tokens, engine in history:
        prefixes.remember(tokens, engine)
    expected = None
    for length in range(BLOCK, len(prompt) + 1, BLOCK):
        owners = [engine for tokens, engine in history if len(tokens) >= length and tokens[:length] == prompt[:length]]
        if not owners:
            break
        expected = owners[-1]
    assert prefixes.find(prompt) == expected


def test_blocks_count_with_all_that_stands_before_them() -> None:
    prefixes = PrefixMap()
    prefixes.remember([1] * BLOCK + [2] * BLOCK, "a")
    assert prefixes.find([1] * BLOCK + [2] * BLOCK + [5]) == "a"
    assert prefixes.find([1] * BLOCK + [3] * BLOCK) == "a"
    assert prefixes.find([3] * BLOCK + [2] * BLOCK) is None
    assert prefixes.find([1] * (BLOCK - 1)) is None


def test_the_oldest_beginnings_are_forgotten() -> None:
    prefixes = PrefixMap(most_blocks=2)
    for number in range(3):
        prefixes.remember([number] * BLOCK, str(number))
    assert [prefixes.find([number] * BLOCK) for number in range(3)] == [None, "1", "2"]
