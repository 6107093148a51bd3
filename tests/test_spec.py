from __future__ import annotations

import numpy as np
import pytest

from router_replay import RouterSpec
from router_replay.errors import SpecError


@pytest.mark.parametrize(("experts", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)])
def test_the_dtype_comes_from_the_number_of_experts_alone(experts: int, dtype: type) -> None:
    assert RouterSpec(experts, 1, (0,)).dtype == dtype


def test_row_bytes_of_qwen3_30b() -> None:
    assert RouterSpec(128, 8, tuple(range(48))).row_bytes == 384


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, (0,)), "num_experts must be between 1 and 65536, got 0"),
        ((65537, 1, (0,)), "got 65537"),
        ((8, 0, (0,)), "top_k must be between 1 and num_experts=8, got 0"),
        ((8, 9, (0,)), "got 9"),
        ((8, 2, ()), "layers is empty"),
        ((8, 2, (3, 1)), "ascending"),
        ((8, 2, (-1, 1)), "ascending"),
        ((8, 2.0, (0,)), "top_k must be an integer"),
        ((8, True, (0,)), "top_k must be an integer"),
        ((8, 2, "01"), "layers must be a sequence"),
        ((8, 2, (0.5,)), "a layer id must be an integer"),
    ],
)
def test_an_impossible_spec_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RouterSpec(*arguments)


def test_a_layer_with_two_routers_stands_twice() -> None:
    assert RouterSpec(8, 2, (0, 0, 1, 1)).row_shape == (4, 2)


def test_select_keeps_absolute_ids_and_refuses_dense_layers() -> None:
    spec = RouterSpec(8, 2, (1, 2, 3, 4), num_layers=5)
    assert spec.select([3, 4]).layers == (3, 4)
    with pytest.raises(SpecError, match=r"layers \[0\] have no router"):
        spec.select([0, 1])


def test_num_layers_takes_no_part_in_equality_but_must_reach() -> None:
    assert RouterSpec(8, 2, (1,), num_layers=4) == RouterSpec(8, 2, (1,))
    with pytest.raises(SpecError, match="greater than the last routed layer"):
        RouterSpec(8, 2, (4,), num_layers=4)


def test_the_order_of_slots_has_no_meaning_unless_it_is_said() -> None:
    assert RouterSpec(8, 2, (0,)).ordered is False
    assert RouterSpec(8, 2, (0,), ordered=np.True_).ordered is True
    assert RouterSpec(8, 2, (0,), ordered=True) != RouterSpec(8, 2, (0,))
    for wrong in (1, "yes", None):
        with pytest.raises(SpecError, match="ordered must be True or False"):
            RouterSpec(8, 2, (0,), ordered=wrong)  # type: ignore[arg-type]


def test_row_bytes_count_two_bytes_an_id_above_256_experts() -> None:
    assert RouterSpec(512, 3, (0, 1)).row_bytes == 2 * 3 * 2


def test_an_engine_has_a_column_for_every_layer_up_to_the_last_that_is_known() -> None:
    assert RouterSpec(8, 2, (1, 2, 6)).engine_layers == 7
    assert RouterSpec(8, 2, (1, 2, 6), num_layers=9).engine_layers == 9


def test_num_layers_counts_from_one() -> None:
    assert RouterSpec(8, 2, (0,), num_layers=1).num_layers == 1
    for wrong in (0, -1, 1.0, True):
        with pytest.raises(SpecError, match="num_layers must be"):
            RouterSpec(8, 2, (0,), num_layers=wrong)
