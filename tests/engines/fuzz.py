"""Play the state machine of engines for a long time; the first sequence of steps that fails is shown, shortened.

python -m tests.engines.fuzz --minutes 10
"""

from __future__ import annotations

import argparse
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engines.machine import EngineMachine

GAMES = 50  # in one round, after which the clock is looked at
LONG = settings(
    max_examples=GAMES,
    stateful_step_count=30,
    deadline=None,
    database=None,  # every round draws anew
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no new round after this time")
    end = time.monotonic() + 60 * parser.parse_args().minutes
    rounds = 0
    while time.monotonic() < end:
        run_state_machine_as_test(EngineMachine, settings=LONG)
        rounds += 1
    print(f"{rounds * GAMES} games of up to 30 steps: every request landed, with the versions of its tokens")  # noqa: T201


if __name__ == "__main__":
    main()
