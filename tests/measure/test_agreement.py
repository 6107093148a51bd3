"""Agreement of routes, against shares counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from router_replay.errors import MeasureError
from router_replay.measure import route_agreement
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 3))
A = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[1, 2], [3, 4]], [[5, 6], [7, 0]]]
B = [[[1, 0], [2, 3]], [[4, 5], [6, 0]], [[1, 7], [3, 5]], [[6, 5], [0, 7]]]
# equal: both (in other order); the first only; neither; both (in other order)


def test_shares_by_hand() -> None:
    agreement = route_agreement(Routes(A, SPEC), Routes(B, SPEC))
    assert agreement.rows == 4
    assert agreement.overall == 5 / 8
    assert agreement.per_layer.tolist() == [3 / 4, 2 / 4]
    assert agreement.per_token.tolist() == [1.0, 0.5, 0.0, 1.0]
    assert agreement.tokens_all_equal == 2 / 4


def test_only_rows_captured_on_both_sides_count() -> None:
    a = Routes(A, SPEC, captured=[True, True, False, True])
    b = Routes(B, SPEC, captured=[False, True, True, True])
    agreement = route_agreement(a, b)
    assert agreement.rows == 2
    assert agreement.overall == 3 / 4
    assert agreement.per_layer.tolist() == [1.0, 1 / 2]
    assert np.array_equal(agreement.per_token, [np.nan, 0.5, np.nan, 1.0], equal_nan=True)
    assert agreement.tokens_all_equal == 1 / 2


def test_sharing_some_experts_is_not_agreeing() -> None:
    spec = RouterSpec(num_experts=8, top_k=4, layers=(0,))
    agreement = route_agreement(Routes([[[0, 1, 2, 3]]], spec), Routes([[[3, 2, 1, 4]]], spec))
    assert agreement.overall == 0.0


def test_routes_agree_with_their_own_sets() -> None:
    spec = RouterSpec(num_experts=512, top_k=8, layers=tuple(range(3, 9)))
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((50, 6, 512)), axis=2)[:, :, :8]
    agreement = route_agreement(Routes(ids, spec), Routes(rng.permuted(ids, axis=2), spec))
    assert (agreement.overall, agreement.tokens_all_equal, agreement.rows) == (1.0, 1.0, 50)


def test_what_cannot_be_compared() -> None:
    a = Routes(A, SPEC)
    with pytest.raises(MeasureError, match="of the same model"):
        route_agreement(a, Routes(B, RouterSpec(num_experts=8, top_k=2, layers=(1, 2))))
    with pytest.raises(MeasureError, match="the same number of rows, got 4 and 3"):
        route_agreement(a, Routes(B, SPEC)[:3])
    with pytest.raises(MeasureError, match="none of the 4 rows"):
        route_agreement(a, Routes.missing(4, SPEC))
    with pytest.raises(MeasureError, match="none of the 0 rows"):
        route_agreement(a[:0], a[:0])
