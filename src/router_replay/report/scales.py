"""Compute axes: the position of a value between the ends of a chart, and the round values of its labels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from router_replay.number_format import Kind, scientific

TINY = 1e-290
"""Smaller values are treated as 0, because sums and ratios of them would underflow."""
ZERO_BAND = 0.14
"""The part of a logarithmic axis that is kept for the value 0, if there is one."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Describe an axis: `place` returns 0 at the low end and 1 at the high end; `ticks` are (value, label)."""

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_scale(values: Sequence[float], kind: Kind, from_zero: bool = False, most_ticks: int = 5) -> Scale:
    """Return a linear axis for `values` with round ends; `from_zero` includes 0. Equal values get a margin."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(-low, high)
    if high - low <= max(1e-9 * size, TINY):  # one value, or all equal: add a margin
        air = 0.1 * size if size > TINY else (0.01 if kind == "share" else 1.0)
        low, high = (low if from_zero else low - air), high + air
    step = _round_step((high - low) / (most_ticks - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    low, high = first * step, last * step
    ticks = tuple((index * step, _label(index * step, step, kind)) for index in range(first, last + 1))
    return Scale(lambda value: (value - low) / (high - low), ticks)


def step_scale(steps: Sequence[int]) -> Scale:
    """Return the horizontal axis. It ends at the last step, without a margin."""
    low, high = min(steps), max(steps)
    if low == high:
        return Scale(lambda _: 0.5, ((low, str(low)),))
    step = max(1, round(_round_step((high - low) / 6)))
    ticks = tuple((at, f"{at:,}") for at in range(-(-low // step) * step, high + 1, step))
    return Scale(lambda value: (value - low) / (high - low), ticks)


def log_scale(values: Sequence[float]) -> Scale:
    """Return a logarithmic axis for values from 0 up; 0 is placed below the decades.

    At least one value must be above TINY.
    """
    above = [value for value in values if value > TINY]
    low, high = _one_two_five(min(above), down=True), _one_two_five(max(above), down=False)
    if low == high:
        low, high = low / 2, high * 2
    floor = ZERO_BAND if len(above) < len(values) else 0.0
    span = math.log10(high / low)

    def place(value: float) -> float:
        return floor + (1 - floor) * math.log10(value / low) / span if value >= low else 0.0

    ticks = tuple((value, scientific(value, 0)) for value in _decades(low, high))
    return Scale(place, (((0.0, "0"),) if floor else ()) + ticks)


def _round_step(rough: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * (1 - 1e-9))


def _one_two_five(value: float, down: bool) -> float:
    exponent = math.floor(math.log10(value))
    steps = [float(f"{factor}e{exponent}") for factor in (1, 2, 5)] + [float(f"1e{exponent + 1}")]
    return max(step for step in steps if step <= value) if down else min(step for step in steps if step >= value)


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten, at most six; if there are fewer than three, also 2 and 5 times them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [value for exponent in range(first, last + 1) if low <= (value := float(f"1e{exponent}")) <= high]
    if len(powers) >= 3:
        return powers[:: -(-len(powers) // 6)]
    ticks = [float(f"{factor}e{exponent}") for exponent in range(first, last + 1) for factor in (1, 2, 5)]
    return [value for value in ticks if low <= value <= high]


def _label(value: float, step: float, kind: Kind) -> str:
    unit = ""
    if kind == "share":
        value, step, unit = 100 * value, 100 * step, " %"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    plain = decimals <= 4 and abs(value) < 1e6
    return (f"{value:,.{decimals}f}" if plain else scientific(value, 1)) + unit
