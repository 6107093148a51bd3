"""The state machine of machine.py for some seconds; `python -m tests.stitch.fuzz` plays it for as long as one likes."""

from __future__ import annotations

from hypothesis import settings

from tests.stitch.machine import TrajectoryMachine

TestTrajectory = TrajectoryMachine.TestCase
TestTrajectory.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
