"""Define what every policy can do, whichever library runs its model, and what all policies share: the optimizer step.

    scored = policy.score(mini)              # the old policy's log-probs; R2 records its routes here
    figures = policy.update(mini, scored)    # one optimizer step, with the routes of the mode replayed

The setting `replay` decides which experts a pass uses: "off" uses the live ones, "r2" those of the scoring pass, and
"r3" the engine's.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from router_replay.batch import NO_LABEL, Batch, LocalBatch
from router_replay.errors import TrainError
from router_replay.measure import RouterFigures
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.losses import LossSums, Slots, Totals
from router_replay.rl.processes.ranks import Ranks
from router_replay.spec import RouterSpec


class NotFiniteError(TrainError):
    """The loss or the gradient is not finite. Both are sums over all ranks, so every rank raises it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """Hold the result of the old-policy pass for one micro-batch. Tensors have one entry per slot of the whole bin.

    `routes` are those to replay in the update, in the form that the policy's own replayer takes; None for live routing.
    """

    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    routes: Any


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Hold one rank's view of the weights, by the names of the Hugging Face model's state dict.

    `like` has a tensor without storage for each weight. `steps` has the optimizer's step of each weight with moments.
    `gather(name, moment)` returns the whole float32 tensor on the first rank, and may return None on others: the
    weight itself if `moment` is empty, otherwise that moment of the optimizer. All ranks must call it in one order,
    and it is valid until the next pass.
    """

    like: Mapping[str, torch.Tensor]
    steps: Mapping[str, torch.Tensor]
    gather: Callable[[str, str], torch.Tensor | None]


class BasePolicy(abc.ABC):
    """The model that learns, on one rank, with its optimizer.

    `model` is the Hugging Face model: its config, the names of its weights, and `save_pretrained`. `attention` says in
    words how the model attends. `one_at_a_time` is True if its passes cannot keep packed sequences apart.
    `row_multiple` is None for packed bins; otherwise a bin is a block of rows of one length, which is a multiple of
    this number, with one sequence per row. `updates` counts the optimizer steps.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    attention: str
    one_at_a_time: bool = False
    row_multiple: int | None = None

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self.updates = 0

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that this rank computes on; None for a CPU."""
        device = self._ranks.device
        return device.index or 0 if device.type == "cuda" else None

    @property
    @abc.abstractmethod
    def spec(self) -> RouterSpec:
        """The RouterSpec of the whole model."""

    @property
    @abc.abstractmethod
    def router_names(self) -> frozenset[str]:
        """The names of the router modules in the Hugging Face model."""

    @abc.abstractmethod
    def score(self, mini: MiniBatch) -> list[Scored]:
        """Compute the log-probs of the old policy, and of the reference model, for every micro-batch."""

    @abc.abstractmethod
    def route_counts(self) -> Stats:
        """Return the Stats of all passes since the last call, summed over ranks. Waits for the device.

        Call it once per step, on all ranks.
        """

    @abc.abstractmethod
    def router_figures(self) -> RouterFigures | None:
        """Return how the routers used their experts since the last call, over all ranks. Waits for the device.

        The scoring passes are measured; where there are none, those of the updates. None if nothing is measured. Call
        it once per step, on all ranks.
        """

    @abc.abstractmethod
    def shards(self) -> Shards:
        """Return this rank's shards of the weights and of the optimizer's state. All ranks must call it."""

    @abc.abstractmethod
    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load this rank's share of the optimizer's state.

        `state` has for each trained weight its "step" and its moments. A moment is a whole tensor, or an object whose
        `[place]` reads that part of it.
        """

    # -- one optimizer step ---------------------------------------------------------------------

    def update(self, mini: MiniBatch, scored: Sequence[Scored]) -> dict[str, float]:
        """Make one optimizer step over the mini-batch, and return its loss and other figures for the metrics.

        Raise NotFiniteError, before any weight changes, if the loss or the gradient is not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        totals = Totals(mini.tokens, mini.sequences, self._config.longest_response)
        loss, sums = self._backward(mini, scored, totals)
        figures = self._figures(loss, sums, self._clip())
        for name in ("loss", "grad_norm"):
            self._refuse_not_finite(name, figures[name])
        figures["lr"] = self._step()
        return figures

    @abc.abstractmethod
    def _backward(self, mini: MiniBatch, scored: Sequence[Scored], totals: Totals) -> tuple[torch.Tensor, LossSums]:
        """Compute the gradients of the mini-batch; return the loss and the sums of this rank's micro-batches."""

    @abc.abstractmethod
    def _clip(self) -> torch.Tensor:
        """Clip the gradients and return their norm before that."""

    def _weights_changed(self) -> None:  # noqa: B027  (most policies need nothing here)
        """Take note of an optimizer step."""

    def _adamw(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of the run's settings for these float32 `parameters`."""
        return torch.optim.AdamW(
            parameters,
            lr=self._config.optimizer.lr,
            betas=self._config.optimizer.betas,
            weight_decay=self._config.optimizer.weight_decay,
            fused=True,  # one kernel for all weights, on CPUs too
        )

    def _figures(self, loss: torch.Tensor, sums: LossSums, norm: torch.Tensor) -> dict[str, float]:
        """Return means over the mini-batch on all ranks, and the norm of the gradient.

        This is the only place where an update waits for the device. Ranks that share sequences all computed the same
        loss.
        """
        ranks = self._ranks
        names = [field.name for field in dataclasses.fields(sums)]
        values = torch.stack([loss, *(getattr(sums, name).to(loss.dtype) for name in names)])
        values = ranks.sum(values if ranks.piece == 0 else torch.zeros_like(values))
        total, *rest, norm_value = torch.cat([values, norm.reshape(1).to(values.dtype)]).tolist()
        by_name = dict(zip(names, rest, strict=True))
        tokens = max(1.0, by_name["tokens"])
        return {
            "loss": total,
            "ppo_kl": by_name["ppo_kl"] / tokens,
            "clip_fraction": by_name["clipped"] / tokens,
            "entropy": by_name["entropy"] / tokens,
            "reference_kl": by_name["kl"] / tokens,
            "truncated_fraction": by_name["truncated"] / tokens,
            "grad_norm": norm_value,
        }

    def close(self) -> None:  # noqa: B027  (most policies hold nothing)
        """Free what outlives the object; the policy cannot be used afterwards."""

    def _step(self) -> float:
        optimizer = self._config.optimizer
        rate = optimizer.lr * min(1.0, (self.updates + 1) / max(1, optimizer.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._weights_changed()
        self.updates += 1
        return rate

    def _refuse_not_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {value} at optimizer step {self.updates}; this step did not change the weights. "
                "A lower optimizer.lr, a lower optimizer.max_grad_norm or loss.truncated_importance may help"
            )


def slots_of(now: torch.Tensor, micro: LocalBatch, old: Scored, device: torch.device, version: int) -> Slots:
    """Return what the loss needs: the log-probs `now`, those of the old pass, and the tensors of the micro-batch.

    `version` is the policy version that the update changes.
    """
    tensors = micro.to_torch(device)
    return Slots(
        logprobs=now,
        old_logprobs=old.old_logprobs,
        rollout_logprobs=tensors.whole("label_logprobs"),
        advantages=tensors.whole("label_advantages"),
        mask=tensors.whole("label_mask"),
        sequences=tensors.whole("sample_ids"),
        reference_logprobs=old.reference_logprobs,
        ages=version - tensors.whole("label_versions"),
    )


def counted_slots(whole: Batch) -> np.ndarray:
    """Return a mask [slots] of the tokens that routing metrics count: they predict something, in a trained sequence.

    Sequences without a loss only make the ranks even, and stand in another bin as well.
    """
    ids, inside = whole.sample_ids, whole.sample_ids >= 0
    trained = np.bincount(ids[inside], whole.label_mask[inside]) > 0
    mask: np.ndarray = (whole.labels != NO_LABEL) & inside
    mask[inside] &= trained[ids[inside]]
    return mask


def old_and_rollout(minis: Sequence[MiniBatch], scored: Sequence[Sequence[Scored]]) -> np.ndarray:
    """Return the old and rollout log-probs of the tokens with a loss, [2, tokens]."""
    pairs = []
    for mini, marks in zip(minis, scored, strict=True):
        for micro, mark in zip(mini.micro, marks, strict=True):
            mask = micro.whole.label_mask
            pairs.append(np.stack([mark.old_logprobs.cpu().numpy()[mask], micro.whole.label_logprobs[mask]]))
    return np.concatenate(pairs, axis=1)
