"""Run the demo's training steps in one version of this package, each on request: the worker of `bench.demo_step`.

The same file works with the package at commit 1b089bf and with this one; PYTHONPATH says which. It takes the folder of
the run and the number of steps. It reads one line from stdin before every step, and answers each step with one line
that begins with MARK.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import time
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.train_step import MARK, first_of


class Turns:
    """Waits before every step, and tells what the step took."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._started = 0.0
        self._cpu = (0.0, 0.0)

    def wait(self) -> None:
        """Wait for the line that allows the next step."""
        if not sys.stdin.readline():
            sys.exit("the bench has ended")
        self._cpu, self._started = self._cpu_seconds(), time.perf_counter()

    def tell(self, values: dict[str, float]) -> None:
        """Print the seconds of the step that ends here; `values` are its metrics."""
        wall = time.perf_counter() - self._started
        trainer, engine = (now - before for now, before in zip(self._cpu_seconds(), self._cpu, strict=True))
        phases = {name.removeprefix("seconds/"): value for name, value in values.items() if name.startswith("seconds/")}
        found = {**phases, "step": wall, "trainer, CPU": trainer, "engine, CPU": engine, "step, CPU": trainer + engine}
        print(MARK + json.dumps({**found, "tokens": values["tokens"], "k3": values["mismatch/k3"]}), flush=True)

    def _cpu_seconds(self) -> tuple[float, float]:
        """Return the user and system time of this process, and of the processes that it started."""

        def of(process: psutil.Process) -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        return of(self._me), sum(of(child) for child in self._me.children(recursive=True))


def main() -> None:
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    demo = first_of("router_replay.recipes.tiny.demo", "router_replay.rl.demo")
    metrics = first_of("router_replay.rl.log.metrics", "router_replay.rl.metrics")
    turns, write = Turns(), metrics.MetricsWriter.write

    @functools.wraps(write)
    def write_and_wait(writer: Any, step: int, values: dict[str, float]) -> None:
        write(writer, step, values)
        turns.tell(values)
        if step + 1 < steps:
            turns.wait()

    metrics.MetricsWriter.write = write_and_wait
    turns.wait()  # the first step also starts the engine; the bench leaves it out
    demo.train(demo.demo_config("r3", folder, steps, False))


if __name__ == "__main__":
    main()
