"""Track the current phase of a run for the display and the watch, and measure each phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from router_replay.rl.log.display import Display, Quiet
from router_replay.rl.processes.watch import NoWatch, Watch

CHECKPOINT = "seconds/checkpoint"


class Phases:
    """Name the phase of a step and measure it. `seconds` goes into the step's metrics."""

    def __init__(self, display: Display | Quiet, watch: Watch | NoWatch) -> None:
        self._display, self._watch = display, watch
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def begin_step(self) -> None:
        """Start to measure a step.

        The last checkpoint was written after its own step's metrics, so its time is reported with this step.
        """
        self._started = time.perf_counter()
        self.seconds = {name: value for name, value in self.seconds.items() if name == CHECKPOINT}

    def end_step(self) -> dict[str, float]:
        """Return the seconds of the step and of each of its phases."""
        seconds, self.seconds = self.seconds, {}
        return {**seconds, "seconds/step": time.perf_counter() - self._started}

    def say(self, phase: str) -> None:
        """Show the phase on the display, and tell it to the watch."""
        self._display.phase(phase)
        self._watch.phase(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the block, and add its time to `seconds`; not if the block raises.

        The work of the block on a GPU is part of its time.
        """
        self.say(name)
        started = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[f"seconds/{name}"] = time.perf_counter() - started
