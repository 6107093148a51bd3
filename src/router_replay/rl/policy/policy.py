"""Define Policy, the model that learns: it computes log-probs under the mode's routing and makes optimizer steps.

    scored = policy.score(mini)              # the old policy's log-probs; R2 records its routes here
    figures = policy.update(mini, scored)    # one optimizer step, with the routes of the mode replayed

The setting `replay` decides which experts a pass uses: "off" uses the live ones, "r2" those of the scoring pass, and
"r3" the engine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from router_replay.batch import NO_LABEL, LocalBatch
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import TrainError
from router_replay.forward import Ulysses, logprobs, use_packed_attention
from router_replay.forward.attention import attention_of
from router_replay.forward.packing import why_not_packed
from router_replay.replay import RouterReplay
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.losses import LossSums, Slots, Totals, policy_loss
from router_replay.rl.policy.models import compile_layers, load_model, model_folder, weights_of
from router_replay.rl.processes.ranks import Ranks


class NotFiniteError(TrainError):
    """The loss or the gradient is not finite. Both are sums over all ranks, so every rank raises it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """Hold the result of the old-policy pass for one micro-batch. Tensors have one entry per slot of the whole bin."""

    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    routes: LocalBatch | TensorRoutes | None  # to replay in the update


class Policy:
    """Hold one rank's part of the model, its optimizer, and its reference model if there is one.

    `attention` says in words how the model attends to packed sequences.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, folder: pathlib.Path) -> None:
        self._config, self._ranks = config, ranks
        self.model = load_model(folder, config.model, ranks)
        self._weights = weights_of(self.model, config.model, ranks)
        self.replayer = RouterReplay(self.model)
        self.one_at_a_time = bool(why_not_packed(self.model))
        self._ulysses, self.attention = _attend(self.model, config, ranks)
        if config.model.gradient_checkpointing != "off":
            reentrant = config.model.gradient_checkpointing == "reentrant"
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if config.trainer.compile:
            compile_layers(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=True,  # one kernel for all weights, on CPUs too
        )
        self.updates = 0
        self._counted = self.replayer.stats
        self._beside: list[Stats] = []  # passes without replay, which the replayer does not count
        self._forget_comparisons()
        self._reference = _Reference(config, ranks) if config.reference.kl else None

    # -- the two passes -------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, mini: MiniBatch) -> list[Scored]:
        """Compute the log-probs of the old policy, and of the reference model, for every micro-batch."""
        self.model.eval()
        with self._weights.computing():
            return [self._score(micro) for micro in mini.micro]

    def update(self, mini: MiniBatch, scored: Sequence[Scored]) -> dict[str, float]:
        """Make one optimizer step over the mini-batch, and return its loss and other figures for the metrics.

        Raise NotFiniteError, before any weight changes, if the loss or the gradient is not finite.
        """
        config, ranks = self._config, self._ranks
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        totals = Totals(mini.tokens, mini.sequences, config.longest_response)
        loss_sum, sums = torch.zeros((), device=ranks.device), None
        with self._weights.computing():
            for micro, old in zip(mini.micro, scored, strict=True):
                ranks.watch.beat()
                with self._replaying(micro, old.routes):
                    slots = _slots(self._logprobs(micro), micro, old, ranks.device, mini.version)
                    loss, found = policy_loss(slots, config.loss, totals, config.reference.kl)
                    (loss * ranks.world).backward()  # FSDP2 takes the mean over ranks; the loss is a sum over them
                loss_sum = loss_sum + loss.detach()
                sums = found if sums is None else sums + found
        assert sums is not None
        figures = self._figures(loss_sum, sums, self._clip())
        for name in ("loss", "grad_norm"):
            self._refuse_not_finite(name, figures[name])
        figures["lr"] = self._step()
        return figures

    def route_counts(self) -> Stats:
        """Return the Stats of all passes since the last call, summed over ranks. Waits for the device.

        Call it once per step.
        """
        stats, beside = self.replayer.stats, self._beside
        if rows := self._rows_compared:
            shares = [agreed / rows for agreed in self._agreed_L.tolist()]
            beside.append(Stats.compared(stats.layers, rows, shares))
        found = sum(beside, start=stats.since(self._counted))
        self._counted, self._beside = stats, []
        self._forget_comparisons()
        summed = self._ranks.sum(torch.tensor(found.counts(), device=self._ranks.device))
        return Stats.from_counts(found.layers, summed.tolist())

    def _forget_comparisons(self) -> None:
        """Start to count anew in how many rows the engine and a model without replay chose the same experts."""
        self._rows_compared = 0
        self._agreed_L = torch.zeros(len(self.replayer.spec.layers), dtype=torch.int64, device=self._ranks.device)

    def _score(self, micro: LocalBatch) -> Scored:
        self._ranks.watch.beat()
        routes: LocalBatch | TensorRoutes | None = None
        if self._config.loss.old == "rollout":  # no pass: the engine's own log-probs are the old ones
            old = micro.to_torch(self._ranks.device).whole("label_logprobs")
            routes = micro if self._config.replay == "r3" else None
        elif self._config.replay == "r3":
            routes = micro
            with self._replaying(micro, routes, agreement=self._config.trainer.agreement):
                old = self._logprobs(micro)
        else:
            with self.replayer.record() as recording, self._replaying(micro, None):
                old = self._logprobs(micro)
            if self._config.trainer.agreement and micro.routes is not None:
                self._compare(micro, recording.tensors)
            if self._config.replay == "r2":
                routes = recording.tensors
        reference = None if self._reference is None else self._reference.logprobs(micro, routes)
        return Scored(old, reference, routes)

    # -- inside ---------------------------------------------------------------------------------

    def _logprobs(self, micro: LocalBatch) -> torch.Tensor:
        return whole_logprobs(self.model, micro, self._ranks, self._ulysses, self._config.rollout.temperature)

    @contextlib.contextmanager
    def _replaying(
        self, micro: LocalBatch, routes: LocalBatch | TensorRoutes | None, agreement: bool = False
    ) -> Iterator[None]:
        """Return the context of one pass; the routing is live if there are no routes to replay."""
        if routes is None:
            rows = int((micro.labels != NO_LABEL).sum())
            self._beside.append(Stats.live(self.replayer.spec.layers, rows))
            yield
            return
        on_missing = self._config.rollout.on_missing
        with self.replayer.replay(routes, on_missing=on_missing, loss_mask=micro.label_mask, agreement=agreement):
            yield

    def _compare(self, micro: LocalBatch, own: TensorRoutes) -> None:
        """Count on the device in how many rows the engine's experts equal the model's own, per layer."""
        assert micro.routes is not None
        engine = micro.to_torch(own.device).routes
        assert engine is not None
        theirs, mine = (ids_TLK.to(torch.int32).sort(-1).values for ids_TLK in (engine.ids, own.ids))
        same_TL = (theirs == mine).all(-1) & engine.captured[:, None]
        self._agreed_L = self._agreed_L + same_TL.sum(0)
        self._rows_compared += int(micro.routes.captured.sum())

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

    def _clip(self) -> torch.Tensor:
        """Clip the gradients and return their norm before that."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _step(self) -> float:
        optimizer = self._config.optimizer
        rate = optimizer.lr * min(1.0, (self.updates + 1) / max(1, optimizer.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._weights.changed()
        self.updates += 1
        return rate

    def _refuse_not_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {value} at optimizer step {self.updates}; this step did not change the weights. "
                "A lower optimizer.lr, a lower optimizer.max_grad_norm or loss.truncated_importance may help"
            )


class _Reference:
    """Hold a frozen model beside the policy. The two share no weights and no state."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._model = load_model(model_folder(config.reference.path or config.model.path), config.model, ranks)
        self._model.requires_grad_(False).eval()
        self._weights = weights_of(self._model, config.model, ranks)
        self._replayer = RouterReplay(self._model)
        self._ulysses, _ = _attend(self._model, config, ranks)

    def logprobs(self, micro: LocalBatch, routes: LocalBatch | TensorRoutes | None) -> torch.Tensor:
        block: Any = contextlib.nullcontext()
        if routes is not None and self._config.reference.replay:
            block = self._replayer.replay(routes, on_missing="live")
        with block, self._weights.computing():
            return whole_logprobs(self._model, micro, self._ranks, self._ulysses, self._config.rollout.temperature)


def _attend(model: Any, config: TrainConfig, ranks: Ranks) -> tuple[Ulysses | None, str]:
    """Set how the model attends to packed sequences. Return Ulysses if ranks share them, and the choice in words."""
    kind, dtype = config.model.attention, getattr(torch, config.model.dtype)
    chosen = attention_of(model, kind, dtype)
    if ranks.ulysses > 1:
        return Ulysses(model, ranks.group, kind), f"{chosen}, Ulysses over {ranks.ulysses} processes"
    return None, use_packed_attention(model, kind, dtype)


def whole_logprobs(
    model: Any, micro: LocalBatch, ranks: Ranks, ulysses: Ulysses | None, temperature: float
) -> torch.Tensor:
    """Return the log-prob of every label of the bin, even if this rank computed only a piece of it."""
    if ulysses is None:
        return logprobs(model, micro, temperature=temperature)
    arguments = ulysses.arguments(micro.whole)
    piece = logprobs(model, micro, temperature=temperature, **arguments)
    ulysses.check(arguments)
    return _Gather.apply(piece, ranks)


class _Gather(torch.autograd.Function):
    """Gather the pieces of a bin into the whole, on every rank that shares it.

    Each rank computes the same loss over the whole bin and keeps the gradient of its own piece only, so together they
    produce every gradient once.
    """

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.start, ctx.length = ranks.piece * len(piece), len(piece)
        pieces = [torch.empty_like(piece) for _ in range(ranks.ulysses)]
        dist.all_gather(pieces, piece.contiguous(), group=ranks.group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][ctx.start : ctx.start + ctx.length], None


def _slots(now: torch.Tensor, micro: LocalBatch, old: Scored, device: torch.device, version: int) -> Slots:
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


def old_and_rollout(minis: Sequence[MiniBatch], scored: Sequence[Sequence[Scored]]) -> np.ndarray:
    """Return the old and rollout log-probs of the tokens with a loss, [2, tokens]."""
    pairs = []
    for mini, marks in zip(minis, scored, strict=True):
        for micro, mark in zip(mini.micro, marks, strict=True):
            mask = micro.whole.label_mask
            pairs.append(np.stack([mark.old_logprobs.cpu().numpy()[mask], micro.whole.label_logprobs[mask]]))
    return np.concatenate(pairs, axis=1)
