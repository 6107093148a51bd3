"""Run recorded tokens through the trainer's model: live, with replay, in other number types, and with noisy routers."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from router_replay.batch import Batch, Sample, pack
from router_replay.errors import ReplayError
from router_replay.forward import logprobs
from router_replay.forward.router_precision import compute_routers_in_float32
from router_replay.replay import RouterReplay
from router_replay.rl.config import ModelConfig
from router_replay.rl.policy.models import read_model
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.verify.gates import RouterOutputs

Tick = Callable[[], object]


@dataclasses.dataclass(frozen=True, eq=False)
class Live:
    """One live pass: the experts that the routers chose, `ids` [T, L, K], and `logprobs` [T - 1], for each sequence."""

    ids: list[np.ndarray]
    logprobs: list[np.ndarray]


class Trainer:
    """The model of `folder` on `device`, in float32 until `use` says otherwise."""

    def __init__(self, folder: pathlib.Path, device: str, temperature: float = 1.0) -> None:
        self._model = read_model(folder, ModelConfig()).to(device).eval()
        self._replayer = RouterReplay(self._model)
        self._temperature = temperature

    @property
    def spec(self) -> RouterSpec:
        """The spec of the model's routers."""
        return self._replayer.spec

    @property
    def why_not_gates(self) -> str:
        """Why gate weights cannot be kept and given in this family; empty if they can."""
        return RouterOutputs.why_not(self._replayer.routers)

    def gates(self) -> RouterOutputs:
        """Return an empty store of gate weights for `replayed`."""
        return RouterOutputs(self._replayer.routers)

    def to_bfloat16(self) -> None:
        """Compute in bfloat16 from now on."""
        self._model.to(torch.bfloat16)

    def to_float32_routers(self) -> bool:
        """Compute the routers in float32 from now on; return False if this family cannot."""
        self._replayer.detach()
        try:
            compute_routers_in_float32(self._model)
        except ReplayError:
            return False
        finally:
            self._replayer = RouterReplay(self._model)
        return True

    def live(self, samples: Sequence[Sample], tick: Tick) -> Live:
        """Run the samples with live routing."""
        found = Live([], [])
        for batch in _batches(samples):
            with torch.no_grad(), self._replayer.record() as recorded:
                own = self._logprobs(batch)
            found.ids.append(recorded.routes.ids.astype(np.int64))
            found.logprobs.append(own)
            tick()
        return found

    def replayed(
        self,
        samples: Sequence[Sample],
        routes: Sequence[Routes],
        tick: Tick,
        keep: RouterOutputs | None = None,
        give: RouterOutputs | None = None,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Run the samples with their `routes`; return the log-probs, and the share [L] on which live routers agree.

        The gate weights are put into `keep`, or taken from `give`, where an earlier call kept them.
        """
        with contextlib.ExitStack() as stack:
            if keep is not None:
                stack.enter_context(keep.kept())
            if give is not None:
                stack.enter_context(give.given())
            return self._replayed(samples, routes, tick)

    def _replayed(
        self, samples: Sequence[Sample], routes: Sequence[Routes], tick: Tick
    ) -> tuple[list[np.ndarray], np.ndarray]:
        before, found = self._replayer.stats, []
        for batch, rows in zip(_batches(samples), routes, strict=True):
            with torch.no_grad():
                if rows.any_captured:
                    with self._replayer.replay(rows, on_missing="live", agreement=True):
                        found.append(self._logprobs(batch))
                else:
                    found.append(self._logprobs(batch))
            tick()
        agreement = self._replayer.stats.since(before).agreement
        return found, np.array(agreement if agreement is not None else [np.nan] * len(self.spec.layers))

    def noisy(self, samples: Sequence[Sample], seed: int, tick: Tick) -> Live:
        """Run the samples live with noise on the routers' weights, as large as the weights; restore them after."""
        generator = torch.Generator().manual_seed(seed)
        routers = [self._model.get_submodule(name) for name in sorted(self._replayer.router_names)]
        kept = [(weight, weight.detach().clone()) for router in routers for weight in router.parameters()]
        try:
            for weight, before in kept:
                noise = torch.randn(before.shape, generator=generator).to(before)
                weight.data.add_(noise * before.float().std().nan_to_num(0).to(before))
            return self.live(samples, tick)
        finally:
            for weight, before in kept:
                weight.data.copy_(before)

    def _logprobs(self, batch: Batch) -> np.ndarray:
        return logprobs(self._model, batch, temperature=self._temperature).float().cpu().numpy()[:-1]


def _batches(samples: Sequence[Sample]) -> Iterator[Batch]:
    """Yield a batch of each sample by itself: not every family keeps packed sequences apart."""
    for sample in samples:
        yield pack([dataclasses.replace(sample, routes=None)], len(sample))
