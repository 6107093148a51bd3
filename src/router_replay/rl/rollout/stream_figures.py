"""Measure a stream of rollouts: how long the engine had no request, what was wasted, and how long groups waited."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np


class StreamFigures:
    """Hold the measurements since the last `values`. Only the event loop of the stream uses it."""

    def __init__(self) -> None:
        self.wasted = self.resumed = 0  # tokens
        self.queue_seconds: Sequence[float] = ()
        self.evaluation_waited: float | None = None  # seconds that new weights waited for an evaluation
        self._submitted = 0  # requests that the engine has
        self._idle, self._idle_since = 0.0, time.perf_counter()
        self._read_at, self._environment_seconds = self._idle_since, 0.0

    def submitted(self) -> None:
        """Count a request that goes to the engine."""
        if not self._submitted:
            self._idle += time.perf_counter() - self._idle_since
        self._submitted += 1

    def answered(self) -> None:
        """Count a request that came back."""
        self._submitted -= 1
        if not self._submitted:
            self._idle_since = time.perf_counter()

    def values(self, environment_seconds: float) -> dict[str, float]:
        """Return the metrics since the last call. `environment_seconds` are those of the whole run."""
        now = time.perf_counter()
        idle = self._idle + (0.0 if self._submitted else now - self._idle_since)
        values = {
            "async/engine_idle": min(1.0, idle / max(1e-9, now - self._read_at)),
            "async/queue_seconds": float(np.mean(self.queue_seconds)) if self.queue_seconds else 0.0,
            "async/tokens_wasted": self.wasted,
            "async/tokens_resumed": self.resumed,
            "seconds/reward": environment_seconds - self._environment_seconds,
        }
        if self.evaluation_waited is not None:
            values["evaluation/waited"] = self.evaluation_waited
        self.wasted, self.resumed, self.evaluation_waited = 0, 0, None
        self._idle, self._idle_since, self._read_at = 0.0, now, now
        self._environment_seconds = environment_seconds
        return values
