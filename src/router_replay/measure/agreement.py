"""Measures how often two routings of the same tokens chose the same experts.

agreement = route_agreement(rollout_routes, trainer_routes)
agreement.overall             # 0.883: share of equal sets over all tokens and layers
agreement.per_layer           # one share per routed layer
agreement.tokens_all_equal    # 0.24: share of tokens with equal sets in every layer
"""

from __future__ import annotations

import dataclasses

import numpy as np

from router_replay import kernel
from router_replay.errors import MeasureError
from router_replay.routes import Routes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RouteAgreement:
    """The shares of equal sets between two Routes; slot order is ignored, and only rows captured in both count.

    `rows` is the number of rows compared. `overall` is the share over all tokens and layers, `tokens_all_equal` the
    share of tokens whose sets are equal in every layer. `per_layer` [L] follows the spec's layers. `per_token` [T] is
    the share of layers that agree, NaN for a row that was not compared.
    """

    rows: int
    overall: float
    tokens_all_equal: float
    per_layer: np.ndarray
    per_token: np.ndarray


def route_agreement(a: Routes, b: Routes) -> RouteAgreement:
    """Compare the routes `a` and `b` row by row. Both must have the same spec and length.

    Raises MeasureError if they differ in these, or if no row is captured in both.
    """
    if a.spec != b.spec:
        raise MeasureError(f"both routes must be of the same model, got {a.spec} and {b.spec}")
    if len(a) != len(b):
        raise MeasureError(f"both routes must have the same number of rows, got {len(a)} and {len(b)}")
    compared = a.captured & b.captured
    rows = int(compared.sum())
    if not rows:
        raise MeasureError(f"none of the {len(a)} rows is captured in both routes: there is nothing to compare")
    whole = rows == len(a)
    equal_TL = _equal_sets(a.ids if whole else a.ids[compared], b.ids if whole else b.ids[compared])
    per_token = np.full(len(a), np.nan)
    per_token[compared] = equal_TL.mean(axis=1)
    return RouteAgreement(
        rows=rows,
        overall=float(equal_TL.mean()),
        tokens_all_equal=float(equal_TL.all(axis=1).mean()),
        per_layer=equal_TL.mean(axis=0),
        per_token=per_token,
    )


def _equal_sets(a_TLK: np.ndarray, b_TLK: np.ndarray) -> np.ndarray:
    """Return [T, L] equality; only sets whose slots differ are sorted, since most agree in order too."""
    equal_TL = (a_TLK == b_TLK).all(axis=2)
    differ_TL = ~equal_TL
    a_NK, b_NK = kernel.sort_sets(a_TLK[differ_TL]), kernel.sort_sets(b_TLK[differ_TL])
    equal_TL[differ_TL] = (a_NK == b_NK).all(axis=1)
    return equal_TL
