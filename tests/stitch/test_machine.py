"""The state machine of machine.py for some seconds; `python -m tests.fuzz stitch` plays it for as long as one likes."""

from __future__ import annotations

from hypothesis import settings

from tests.stitch.machine import TrajectoryMachine

TestTrajectory = TrajectoryMachine.TestCase
GAMES = 5 * settings.default.max_examples
TestTrajectory.settings = settings(max_examples=GAMES, stateful_step_count=25, deadline=None, derandomize=True)
