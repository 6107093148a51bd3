"""Compute the routing metrics of a step, and find layers whose agreement is out of line with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from router_replay.measure import RouterFigures, out_of_line
from router_replay.number_format import number
from router_replay.replay.stats import Stats


def routing_values(routes: Stats, figures: RouterFigures | None) -> dict[str, Any]:
    """Return the routing metrics by name, from the counts of the rows and the `figures` of the routers.

    A name that ends with "/layers" has a list with one entry per routed layer; `routing/layers` are their ids.
    """
    layers = routes.layers
    values: dict[str, Any] = {}
    if routes.agreement is not None:
        values["routes/agreement"] = float(np.mean(routes.agreement))
        values["routes/agreement_worst"], values["routes/agreement_worst_layer"] = _worst(-1, routes.agreement, layers)
        values["routes/agreement/layers"] = _rounded(routes.agreement)
        values["routes/layers_out_of_line"] = len(out_of_line(routes.agreement, routes.rows_compared))
    if figures is not None and figures.rows:
        values["routing/load"] = float(np.mean(figures.imbalance))
        values["routing/load_worst"], values["routing/load_worst_layer"] = _worst(1, figures.imbalance, layers)
        values["routing/confidence"] = float(np.mean(figures.confidence))
        values["routing/entropy"] = float(np.mean(figures.entropy))
        values["routing/load/layers"] = _rounded(figures.imbalance)
        values["routing/confidence/layers"] = _rounded(figures.confidence)
        values["routing/entropy/layers"] = _rounded(figures.entropy)
    return {**values, "routing/layers": list(layers)} if values else {}


def _worst(sign: int, values: Sequence[float] | np.ndarray, layers: Sequence[int]) -> tuple[float, int]:
    """Return the largest of the `values` (with `sign` -1 the smallest), and the id of its layer."""
    place = int(np.argmax(sign * np.asarray(values)))
    return float(values[place]), layers[place]


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return the values with four digits: there are many of them, and no chart shows more."""
    return [float(f"{value:.4g}") for value in values]


class OutOfLine:
    """Warns of layers whose agreement is out of line with the others, once for each layer."""

    def __init__(self) -> None:
        self._warned: set[int] = set()

    def warnings(self, routes: Stats, step: int) -> list[str]:
        """Return the warnings that the counts of a step give, without those of layers that were named before."""
        if routes.agreement is None:
            return []
        agreement = dict(enumerate(routes.agreement))
        new = [place for place in out_of_line(routes.agreement, routes.rows_compared) if place not in self._warned]
        self._warned.update(new)
        return [_warning(place, agreement, routes.layers, step) for place in new]


def _warning(place: int, agreement: Mapping[int, float], layers: Sequence[int], step: int) -> str:
    others = float(np.median([share for other, share in agreement.items() if other != place]))
    return (
        f"step {step}: in layer {layers[place]} engine and trainer choose the same experts for "
        f"{number(agreement[place], 'share')} of the tokens, and in the other layers for {number(others, 'share')} "
        "(median). A fault of one layer looks like this: an expert-parallel bug, or a kernel or a number type of its "
        "own. `router-replay verify` finds the cause (docs/debugging.md)"
    )
