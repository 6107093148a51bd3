"""Find the layers whose agreement between engine and trainer is out of line with the other layers.

out_of_line([0.99, 0.98, 0.31, 0.97], rows=4000)      # [2]

Agreement falls smoothly with depth, because differences of arithmetic add up on the way. So a layer is held against its
neighbours, and not against all layers: against the median of the four nearest ones. Near the ends these lie on one
side, so the straight line through the two nearest counts too. A layer is out of line if it disagrees more than that by
`MARGIN`, and by `ERRORS` standard errors of a share that was counted over that many rows. Of real models, clean layers
differ from their neighbours by a few hundredths, and a layer with a fault disagrees on most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MARGIN = 0.3
"""Disagreement beyond what the neighbours say that is still no sign of a fault."""
ERRORS = 6.0
"""Standard errors that are still put down to chance: rows of one prompt are alike, so they are fewer than they seem."""
NEAREST = 4


def out_of_line(agreement: Sequence[float] | np.ndarray, rows: int) -> list[int]:
    """Return the places of the layers whose `agreement` [L], a share of `rows`, is out of line with the others.

    A layer by itself is never out of line.
    """
    differs = 1 - np.asarray(agreement, np.float64)
    if len(differs) < 2 or rows < 1 or not np.isfinite(differs).all():
        return []
    levels = np.array([_expected(differs, place) for place in range(len(differs))])
    between = (differs + levels) / 2  # the level alone is a share of 0 too often, whose error would be 0
    limit = np.maximum(MARGIN, ERRORS * np.sqrt(between * (1 - between) / rows))
    return np.flatnonzero(differs - levels > limit).tolist()


def _expected(differs: np.ndarray, place: int) -> float:
    """Return the most disagreement that its neighbours let expect of the layer at `place`."""
    last = len(differs) - 1
    others = np.delete(np.arange(last + 1), place)
    nearest = others[np.argsort(np.abs(others - place), kind="stable")[:NEAREST]]
    level = float(np.median(differs[nearest]))
    if last > 1 and place in (0, last):
        one, two = nearest[:2]
        level = max(level, float(2 * differs[one] - differs[two]))
    elif place in (1, last - 1) and 0 < place < last:
        level = max(level, float(differs[place - 1] + differs[place + 1]) / 2)
    return min(1.0, level)
