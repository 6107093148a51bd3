"""RouterGauge sums what routers do, on the device: the load of their experts, their confidence and their entropy.

    gauge = RouterGauge(replayer.spec)
    with replayer.measure(gauge, labels != NO_LABEL):
        model(...)
    gauge.take()          # waits for the device

Shapes: T tokens, L routed layers, K top-k, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from router_replay.spec import RouterSpec


class RouterGauge:
    """Holds sums over forward passes for the routed layers of `spec`; they move to the device of the first pass."""

    def __init__(self, spec: RouterSpec) -> None:
        layers, experts = len(spec.layers), spec.num_experts
        self._load_LE = torch.zeros(layers, experts, dtype=torch.int64)
        self._sums_L2 = torch.zeros(layers, 2, dtype=torch.float64)  # mass and entropy
        self._rows = torch.zeros((), dtype=torch.int64)

    def add(self, figures: Sequence[Tensor], chosen: Sequence[Tensor], counted_T: Tensor | None) -> None:
        """Add a pass: of each layer its figures [2, T] and the chosen experts [T, K].

        `counted_T` is True for the tokens that count; None means all.
        """
        with torch.no_grad():
            figures_L2T, ids_LTK = torch.stack(list(figures)), torch.stack(list(chosen)).long()
            if counted_T is None:
                counted_T = torch.ones(figures_L2T.shape[-1], dtype=torch.bool, device=ids_LTK.device)
            if self._load_LE.device != ids_LTK.device:
                self._move(ids_LTK.device)
            # a token that does not count may hold no number, as padding of some kernels does
            self._sums_L2 += torch.where(counted_T, figures_L2T, 0.0).sum(-1)
            weights_LTK = counted_T.long()[None, :, None].expand_as(ids_LTK)
            self._load_LE.scatter_add_(1, ids_LTK.flatten(1), weights_LTK.flatten(1))
            self._rows += counted_T.sum()

    def take(self) -> Tensor:
        """Return the sums as one float64 tensor, which can be summed over ranks, and begin anew.

        `measure.RouterFigures.from_sums` reads them: the number of rows, mass and entropy of each layer, then the load.
        """
        sums = torch.cat([self._rows.double().reshape(1), self._sums_L2.T.flatten(), self._load_LE.double().flatten()])
        for one in (self._load_LE, self._sums_L2, self._rows):
            one.zero_()
        return sums

    def _move(self, device: torch.device) -> None:
        self._load_LE, self._sums_L2 = self._load_LE.to(device), self._sums_L2.to(device)
        self._rows = self._rows.to(device)


@dataclasses.dataclass(eq=False)
class Measuring:
    """Holds the gauge of one `measure` block, and which tokens [T] of its passes count; None means all."""

    gauge: RouterGauge
    counted_T: Any = None
