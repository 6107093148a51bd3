"""Define Policy, a transformers model that learns: on one rank as it is, on several ranks in the shards of FSDP2."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from router_replay.batch import NO_LABEL, LocalBatch
from router_replay.batch.tensors import TensorRoutes, on_device
from router_replay.forward import Ulysses, logprobs, use_packed_attention
from router_replay.forward.attention import attention_of
from router_replay.forward.packing import why_not_packed
from router_replay.measure import RouterFigures
from router_replay.replay import RouterReplay
from router_replay.replay.gauge import RouterGauge
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.base import MOMENTS, BasePolicy, Scored, Shards, counted_slots, slots_of
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.losses import LossSums, Totals, policy_loss
from router_replay.rl.policy.models import compile_layers, fill_share, load_model, model_folder, weights_of
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.weights.held import counted
from router_replay.spec import RouterSpec


class Policy(BasePolicy):
    """Hold one rank's part of the model, its optimizer, and its reference model if there is one."""

    def __init__(self, config: TrainConfig, ranks: Ranks, folder: pathlib.Path) -> None:
        super().__init__(config, ranks)
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
        self._parameters = dict(self.model.named_parameters())
        self.optimizer = self._adamw(self.model.parameters())
        self._counted = self.replayer.stats
        self._beside: list[Stats] = []  # passes without replay, which the replayer does not count
        self._forget_comparisons()
        self._gauge = RouterGauge(self.replayer.spec)
        self._reference = _Reference(config, ranks) if config.reference.kl else None

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the model."""
        return self.replayer.spec

    @property
    def router_names(self) -> frozenset[str]:
        """The names of the model's router modules."""
        return self.replayer.router_names

    # -- the two passes -------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, mini: MiniBatch) -> list[Scored]:
        """Compute the log-probs of the old policy, and of the reference model, for every micro-batch."""
        self.model.eval()
        with self._weights.computing():
            return [self._score(micro) for micro in mini.micro]

    def _backward(self, mini: MiniBatch, scored: Sequence[Scored], totals: Totals) -> tuple[torch.Tensor, LossSums]:
        config, ranks = self._config, self._ranks
        self.model.train()
        loss_sum, sums = torch.zeros((), device=ranks.device), None
        with self._weights.computing():
            for micro, old in zip(mini.micro, scored, strict=True):
                ranks.watch.beat()
                measured = self._measured(micro) if config.loss.old == "rollout" else contextlib.nullcontext()
                with measured, self._replaying(micro, old.routes):
                    slots = slots_of(self._logprobs(micro), micro, old, ranks.device, mini.version)
                    loss, found = policy_loss(slots, config.loss, totals, config.reference.kl)
                    (loss * ranks.world).backward()  # FSDP2 takes the mean over ranks; the loss is a sum over them
                loss_sum = loss_sum + loss.detach()
                sums = found if sums is None else sums + found
        assert sums is not None
        return loss_sum, sums

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

    def router_figures(self) -> RouterFigures | None:
        """Return how the routers used their experts since the last call, over all ranks. Waits for the device."""
        if not self._config.trainer.routing_metrics:
            return None
        sums = self._ranks.sum(self._gauge.take().to(self._ranks.device))
        return RouterFigures.from_sums(self.replayer.spec, sums)

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
            replaying = self._replaying(micro, routes, agreement=self._config.trainer.agreement)
            with self._measured(micro), self.replayer.record() as recording, replaying:
                old = self._logprobs(micro)
            # The update uses these experts for missing rows too, so that old and new log-probs share all routing.
            micro.to_torch(self._ranks.device).complete(recording.tensors.ids)
        else:
            with self._measured(micro), self.replayer.record() as recording, self._replaying(micro, None):
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

    def _measured(self, micro: LocalBatch) -> contextlib.AbstractContextManager[None]:
        """Return a block that measures the routers on the tokens of `micro` that count."""
        if not self._config.trainer.routing_metrics:
            return contextlib.nullcontext()
        return self.replayer.measure(
            self._gauge, on_device(counted_slots(micro.whole)[micro.place], self._ranks.device)
        )

    def _compare(self, micro: LocalBatch, own: TensorRoutes) -> None:
        """Count on the device in how many rows the engine's experts equal the model's own, per layer."""
        assert micro.routes is not None
        engine = micro.to_torch(own.device).routes
        assert engine is not None
        theirs, mine = (ids_TLK.to(torch.int32).sort(-1).values for ids_TLK in (engine.ids, own.ids))
        same_TL = (theirs == mine).all(-1) & engine.captured[:, None]
        self._agreed_L = self._agreed_L + same_TL.sum(0)
        self._rows_compared += int(micro.routes.captured.sum())

    def _clip(self) -> torch.Tensor:
        """Clip the gradients and return their norm before that."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _weights_changed(self) -> None:
        self._weights.changed()

    # -- state ----------------------------------------------------------------------------------

    def shards(self) -> Shards:
        """Return this rank's shards; a gathered tensor is on the policy's device. All ranks must call it."""
        held = self.model.state_dict()  # lets FSDP2 free what the last pass gathered
        state = {name: self.optimizer.state.get(parameter) for name, parameter in self._parameters.items()}

        def gather(name: str, moment: str = "") -> torch.Tensor:
            tensor = (state[name] or {})[moment] if moment else held[name]
            return counted(tensor.full_tensor()) if hasattr(tensor, "full_tensor") else tensor.detach()

        like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held.items()}
        return Shards(like, {name: own["step"] for name, own in state.items() if own}, gather)

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load this rank's share of the optimizer's state: of each moment the rows of its shard."""
        for name, parameter in self._parameters.items():
            if name not in state:  # it never had a gradient
                continue
            held: dict[str, Any] = {moment: torch.empty_like(parameter) for moment in MOMENTS}
            for moment, tensor in held.items():
                fill_share(tensor, state[name][moment], self._ranks)
            held["step"] = state[name]["step"].to(parameter.device, copy=True)
            self.optimizer.state[parameter] = held


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
