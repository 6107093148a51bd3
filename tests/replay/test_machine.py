"""The state machine of machine.py for some seconds; `python -m tests.fuzz replay` plays it for longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.replay.machine import ReplayMachine

TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def older_objects_left_out() -> Iterator[None]:
    """The machine collects garbage often, which must not search the objects of all other tests each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
