"""A short part of the tests with the real TRL, in its own virtual environment."""

from __future__ import annotations

import pytest

from tests.short_parts import ROOT, run_selected

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SELECTED = [
    "test_refusals.py::test_this_trl_is_the_one_that_was_tested",
    "test_replay.py::test_the_rows_of_the_loss_are_those_that_the_engine_returned",
    "test_replay.py::test_the_loss_and_the_old_pass_compute_the_same_before_the_first_update",
    "test_routing.py::test_r3_logs_the_load_of_the_engines_experts_and_how_often_the_routers_agree",
    "test_replay.py::test_r2_replays_the_experts_of_the_old_pass_after_the_weights_have_moved",
    "test_weights.py::test_weights_are_pushed_once_for_each_change",
    "test_weights.py::test_the_reference_is_routed_live[True]",
]


@pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not set up: make .venv-trl/.ready, or make test")
def test_a_short_part_of_make_test_trl() -> None:
    run_selected(PYTHON, "tests/trl_real", SELECTED)
