"""Play a state machine of the tests for a long time; the first sequence of steps that fails is shown, shortened.

    python -m tests.fuzz replay --minutes 10

Each machine does the same at random to a part of the package and to a plain model of it, and compares the two.
"""

from __future__ import annotations

import argparse
import importlib
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

GAMES = 50  # in one round, after which the clock is looked at
STEPS = 40
MACHINES = {
    "replay": "tests.replay.machine:ReplayMachine",
    "stitch": "tests.stitch.machine:TrajectoryMachine",
    "engines": "tests.engines.machine:EngineMachine",
}
LONG = settings(
    max_examples=GAMES,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,  # every round draws anew
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("machine", choices=sorted(MACHINES))
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no new round after this time")
    chosen = parser.parse_args()
    module, _, name = MACHINES[chosen.machine].partition(":")
    machine = getattr(importlib.import_module(module), name)
    end = time.monotonic() + 60 * chosen.minutes
    rounds = 0
    while time.monotonic() < end:
        run_state_machine_as_test(machine, settings=LONG)
        rounds += 1
    print(f"{chosen.machine}: {rounds * GAMES} random games of up to {STEPS} steps, no difference")  # noqa: T201


if __name__ == "__main__":
    main()
