"""The state machine of machine.py for some seconds; `python -m tests.fuzz engines` plays it for longer."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.engines.machine import EngineMachine

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
