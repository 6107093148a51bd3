"""The state machine of machine.py for some seconds; `python -m tests.fuzz replay` plays it for longer."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.replay.machine import ReplayMachine

TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
