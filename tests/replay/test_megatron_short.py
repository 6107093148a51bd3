"""A short part of the tests with the real megatron-core. It runs in another process: their shim changes torch."""

from __future__ import annotations

import pytest

from tests.short_parts import ROOT, run_selected

PYTHON = ROOT / ".venv-megatron" / "bin" / "python"
SELECTED = [
    "test_one_rank.py::test_record_changes_nothing_and_its_own_rows_replay_to_the_bit[full]",
    "test_one_rank.py::test_forced_rows_reach_the_experts_and_a_recompute_gives_the_same_gradients[full]",
    "test_one_rank.py::test_missing_rows_are_routed_live_row_by_row[moe]",
    "test_one_rank.py::test_a_failure_in_the_schedule_leaves_nothing[full]",
    "test_one_rank.py::test_multi_token_prediction_is_left_alone",
    "test_one_rank.py::test_padding_rows_are_valid_sets_and_are_not_counted[full]",
    "test_refusals.py::test_rows_that_do_not_fit_are_refused_before_the_schedule",
    "test_refusals.py::test_every_row_must_be_used_as_often_as_it_must",
    "test_scoring.py::test_megatron_and_transformers_agree_under_the_same_routes[softmax after the choice-5]",
    "test_scoring.py::test_megatron_and_transformers_agree_under_the_same_routes[sigmoid, bias, groups, scaling-5]",
    "test_install.py::test_a_forgotten_switch_gives_wrong_router_gradients_alone_and_right_ones_with_install[full]",
    "test_install.py::test_bad_rows_raise_where_they_enter_and_none_of_them_is_kept[an expert twice]",
]


@pytest.mark.skipif(not PYTHON.exists(), reason="megatron-core is not set up: make .venv-megatron/.ready, or make test")
def test_a_short_part_of_make_test_megatron() -> None:
    run_selected(PYTHON, "tests/megatron_real", SELECTED)
