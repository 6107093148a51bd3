"""Format the numbers of a run in the same way in the terminal, the table and the charts.

number(0.00190, "small")   # "1.90e-3"
number(0.883, "share")     # "88.3 %"
number(None, "seconds")    # "–": not recorded
"""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["plain", "small", "share", "count", "seconds", "ratio"]
ABSENT = "–"


def number(value: float | None, kind: Kind) -> str:
    """Format a number for people, with about three significant digits; None, NaN and infinity become a dash."""
    if value is None or not math.isfinite(value):
        return ABSENT
    match kind:
        case "plain":
            return f"{value:.3f}" if not value or 5e-4 <= abs(value) < 1e6 else scientific(value, 2)
        case "small":
            return scientific(value, 2)
        case "share":
            return _percent(100 * value) + " %"
        case "count":
            return f"{value:,.0f}" if abs(value) < 1e15 else scientific(value, 2)
        case "seconds":
            short = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
            return f"{short if abs(value) < 1e9 else scientific(value, 2)} s"
        case "ratio":
            if abs(value) >= 1e6:
                return f"{scientific(value, 2)}×"
            return f"{value:.2f}×" if abs(value) >= 0.095 else f"{value:.2g}×"


def scientific(value: float, digits: int) -> str:
    """Format as 1.90e-3, with `digits` decimals and without Python's plus sign and zero padding in the exponent."""
    if not value:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03; a negative number becomes 0:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _percent(percent: float) -> str:
    if not percent:
        return "0"
    if abs(percent) < 1:
        return f"{percent:.2g}"
    if 99.95 <= percent < 100:  # "100.0" would claim that no token differed
        return f"{min(percent, 99.999):.3f}"
    return f"{percent:.1f}" if abs(percent) < 1e6 else scientific(percent, 2)
