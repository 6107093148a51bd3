"""Sum what the routers do in the passes of a host's trainer, over its processes, for the metrics of `docs/metrics.md`.

routing = RoutingSums(replayer.spec)
with replayer.measure(routing.gauge, counted):
    model(...)
passed = routing.add(summed(routing.sums(stats)))     # `summed` is the host's way to sum a tensor over processes
routing.take(step).values                             # {"routing/load": 1.8, "routes/agreement": 0.88, ...}
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from router_replay.measure import RouterFigures
from router_replay.replay.gauge import RouterGauge
from router_replay.replay.stats import COUNTS_OF_ALL_LAYERS, Stats
from router_replay.rl.loop.routing_values import OutOfLine, routing_values
from router_replay.spec import RouterSpec


class Taken(NamedTuple):
    """The routing metrics by name, and a warning for each layer that is out of line for the first time."""

    values: dict[str, Any]
    warnings: list[str]


class RoutingSums:
    """Holds the sums of the passes since the last `take`, of a model with the routers of `spec`.

    `gauge` is for `RouterReplay.measure`, in the passes whose routers are to be measured.
    """

    def __init__(self, spec: RouterSpec) -> None:
        self.gauge = RouterGauge(spec)
        self._spec = spec
        self._counts = COUNTS_OF_ALL_LAYERS + 3 * len(spec.layers)
        self._total: torch.Tensor | None = None
        self._out_of_line = OutOfLine()

    def sums(self, stats: Stats) -> torch.Tensor:
        """Return the counts of the newest passes, `stats`, and the figures of the gauge, as one float64 tensor.

        It can be summed over processes, and is on the device of the passes. The gauge begins anew.
        """
        figures = self.gauge.take()
        return torch.cat([torch.tensor(stats.counts(), dtype=torch.float64, device=figures.device), figures])

    def add(self, sums: torch.Tensor) -> Stats:
        """Add what `sums` returned, summed over all processes, and return the counts in it. Waits for the device."""
        sums = sums.cpu()
        self._total = sums if self._total is None else self._total + sums
        return self._stats(sums)

    def take(self, step: int) -> Taken:
        """Return the metrics of what was added since the last call, at the end of `step`; nothing if nothing was."""
        if self._total is None:
            return Taken({}, [])
        stats, figures = self._stats(self._total), RouterFigures.from_sums(self._spec, self._total[self._counts :])
        self._total = None
        return Taken(routing_values(stats, figures), self._out_of_line.warnings(stats, step))

    def _stats(self, sums: torch.Tensor) -> Stats:
        return Stats.from_counts(self._spec.layers, [round(count) for count in sums[: self._counts].tolist()])
