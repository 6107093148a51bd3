"""Test what bench.engines concludes from its measurements."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from bench.engine_host import cost_of
from bench.engines import parts_of
from bench.verdicts import Share, verdict


def noisy(share: float, spread: float, rounds: int = 60, seed: int = 0) -> Share:
    """Return the comparison of two engines whose rounds scatter, the second with this share of the first's speed."""
    rng = np.random.default_rng(seed)
    slow = rng.uniform(0.8, 1.4, rounds)  # slow rounds affect both
    base = slow * rng.normal(1, spread, rounds)
    other = slow * rng.normal(1, spread, rounds) / share
    return Share.of(base.tolist(), other.tolist())


def test_a_difference_of_a_few_percent_is_seen_through_slow_rounds() -> None:
    same = noisy(1.0, 0.02, seed=1)
    assert same.noise < 0.03
    assert verdict(noisy(1.0, 0.02, seed=2), 0.97, same) == "kept"
    assert verdict(noisy(0.93, 0.02, seed=3), 0.97, same) == "MISSED"


def test_no_verdict_where_equal_engines_differ_by_as_much_as_the_goal_asks_for() -> None:
    same = noisy(1.0, 0.3, rounds=12)
    assert verdict(noisy(1.2, 0.001), 0.97, same).startswith("no verdict: two equal engines differ")
    assert verdict(noisy(0.9, 0.001), 0.97, same).startswith("no verdict: two equal engines differ")


def test_a_difference_larger_than_noise_and_goal_together_is_a_miss_on_any_machine() -> None:
    same = noisy(1.0, 0.3, rounds=12)
    assert 0.03 < same.noise < 0.4
    assert verdict(noisy(0.5, 0.001), 0.97, same) == "MISSED"


def test_no_verdict_where_the_goal_lies_in_the_interval() -> None:
    same = noisy(1.0, 0.01, seed=4)
    assert verdict(Share(0.972, 0.965, 0.98, 20), 0.97, same).startswith("no verdict: the goal lies in the interval")


def test_no_verdict_after_a_few_rounds() -> None:
    assert verdict(Share.of([1.0] * 9, [1.0] * 9), 0.97, noisy(1.0, 0.01)).startswith("no verdict: 9 rounds")


def test_only_rounds_of_both_can_be_compared() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        Share.of([1.0, 2.0], [1.0])


def test_pauses_do_not_count_and_what_every_round_has_in_one_of_its_parts_does() -> None:
    """Rounds of 40 parts, of which every eighth costs 1.5 in the second mode; some other parts have a pause."""
    rng = np.random.default_rng(5)
    base = rng.normal(1, 0.01, (20, 40))
    other = rng.normal(1, 0.01, (20, 40))
    other[:, ::8] += 0.5
    again = rng.normal(1, 0.01, (20, 40))
    for rounds in (base, other, again):
        rounds[rng.random(rounds.shape) < 0.1] += 10
    found, same = Share.of_parts(base.tolist(), other.tolist()), Share.of_parts(base.tolist(), again.tolist())
    assert found.median == pytest.approx(40 / 42.5, abs=0.005)
    assert same.noise < 0.01
    assert found.low < 40 / 42.5 < found.high
    assert verdict(found, 0.97, same) == "MISSED"
    with pytest.raises(ValueError, match="got 20 and 19"):
        Share.of_parts(base.tolist(), other[1:].tolist())


def test_turns_of_one_kind_have_equally_many_parts() -> None:
    costs: list[Any] = [
        types.SimpleNamespace(before=5.0, intervals=(1.0, 2.0, 3.0), after=7.0),
        types.SimpleNamespace(before=6.0, intervals=(2.0, 3.0), after=8.0),
    ]
    assert parts_of(costs) == [[6.0, 2.0, 3.0, 7.0], [6.0, 2.0, 3.0, 8.0]]


def test_the_parts_of_a_turn_are_what_its_client_waited_for() -> None:
    """Four requests: a step with the prompts of 0.5 s, then decode steps of 0.1 s, one of which took 2 s."""
    start = [10.2, 10.7, 10.8, 12.8, 12.9, 13.0]
    steps = {
        "cpu": 0.7, "compiled": 0, "start": start, "tokens": [32, 4, 4, 4, 4, 4], "requests": [4] * 6,
        "gpu": [0.4, 0.05, 0.05, 0.9, 0.05, 0.05], "parts": {"update": [0.3, 0.01, 0.01, 0.7, 0.01, 0.01]},
    }  # fmt: skip
    cost = cost_of(steps, 4, started=10.0, ended=13.4, client_cpu=0.3)
    assert cost.step == pytest.approx(0.1)
    assert cost.wait == pytest.approx(3.4)
    assert cost.before == pytest.approx(0.2)
    assert cost.intervals == pytest.approx((0.5, 0.1, 2.0, 0.1, 0.1))
    assert cost.after == pytest.approx(0.4)
    assert cost.gpu == pytest.approx(0.4 + 5 * 0.05)
    assert cost.parts == {"update": 0.01}
    assert (cost.steps, cost.decode_steps, cost.core_cpu, cost.client_cpu) == (6, 5, 0.7, 0.3)
