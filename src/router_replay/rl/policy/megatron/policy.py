"""Define MegatronPolicy, a Megatron-core model that learns, divided over ranks by tensor, expert and pipeline.

Its weights come from and go to the Hugging Face layout, and so does the state of its optimizer. Given the same
mini-batches it computes what `Policy` computes, up to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from router_replay.batch import NO_LABEL
from router_replay.batch.megatron import Share
from router_replay.batch.tensors import TensorRoutes
from router_replay.measure import RouterFigures
from router_replay.replay import RouterReplay
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.base import MOMENTS, BasePolicy, Scored, Shards, counted_slots, slots_of
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.losses import LossSums, Totals, policy_loss
from router_replay.rl.policy.megatron import gradients, weights
from router_replay.rl.policy.megatron.model import end_groups, load_model, start_groups
from router_replay.rl.policy.megatron.passes import Passes, Shape, with_routes
from router_replay.rl.policy.models import model_folder
from router_replay.rl.processes.ranks import Ranks
from router_replay.spec import RouterSpec

SUMS = [field.name for field in dataclasses.fields(LossSums)]


class MegatronPolicy(BasePolicy):
    """Hold one rank's part of the model, its optimizer, and its reference model if there is one.

    `model` is the Hugging Face model without weights. `close` forgets Megatron's process groups.
    """

    attention = "Megatron's own, on rows of one sequence each"

    def __init__(self, config: TrainConfig, ranks: Ranks, folder: pathlib.Path) -> None:
        super().__init__(config, ranks)
        start_groups(config.megatron, config.seed)
        self._loaded = load_model(folder, config, ranks)
        self.model, self._chunk = self._loaded.outline, self._loaded.chunk
        self.row_multiple = config.megatron.tensor_parallel
        self._passes = Passes(self._loaded, ranks, config.rollout.temperature)
        self.replayer = self._passes.replayer
        self._collector = weights.Collector(self._chunk, self._loaded.shapes, ranks.rank, ranks.world)
        self.optimizer = self._adamw(self._chunk.parameters())
        self._counted = self.replayer.stats_of_all_ranks()
        self._beside = self._no_counts()
        self._reference: Passes | None = None
        if config.reference.kl:
            path = model_folder(config.reference.path or config.model.path)
            self._reference = Passes(load_model(path, config, ranks), ranks, config.rollout.temperature)

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the whole model, over all pipeline stages."""
        return self.replayer.spec

    @property
    def router_names(self) -> frozenset[str]:
        """The names of the router modules in the Hugging Face model."""
        replayer = RouterReplay(self.model)
        replayer.detach()
        return replayer.router_names

    def close(self) -> None:
        """Forget Megatron's process groups; the policy cannot be used afterwards."""
        end_groups()

    # -- the two passes -------------------------------------------------------------------------

    def score(self, mini: MiniBatch) -> list[Scored]:
        """Compute the log-probs of the old policy, and of the reference model, for every micro-batch."""
        routes: list[Any] | None = None
        if self._config.replay == "r3":
            whole = [with_routes(micro) for micro in mini.micro]
            rows, on_missing = Shape.of(mini).rows, self._config.rollout.on_missing
            routes = [*self.replayer.cut(whole, micro_batch_size=rows, on_missing=on_missing)]
        if self._config.loss.old == "rollout":  # no pass: the engine's own log-probs are the old ones
            old = [micro.to_torch(self._ranks.device).whole("label_logprobs") for micro in mini.micro]
        elif routes is not None:
            agreement = self._config.trainer.agreement
            with self._measured(mini), self._replaying(mini, routes, forward_only=True, agreement=agreement):
                old = self._passes.logprobs(mini)
        else:
            recording, routed = self.replayer.record(), self._replaying(mini, None, forward_only=True)
            with self._measured(mini), recording as recorded, routed:
                old = self._passes.logprobs(mini)
            shape = Shape.of(mini)
            shares = list(recorded.shares) or [self._passes.empty_share(shape)] * shape.count
            if self._config.trainer.agreement:
                self._compare(mini, shares)
            if self._config.replay == "r2":
                routes = shares
        reference = self._reference_logprobs(mini, routes)
        nothing: list[Any] = [None] * len(old)
        return [Scored(*one) for one in zip(old, reference or nothing, routes or nothing, strict=True)]

    def _reference_logprobs(self, mini: MiniBatch, routes: list[Any] | None) -> list[Tensor] | None:
        passes = self._reference
        if passes is None:
            return None
        block: Any = contextlib.nullcontext()
        if routes is not None and self._config.reference.replay:
            shape = Shape.of(mini).arguments
            block = passes.replayer.replay(routes, **shape, forward_only=True, on_missing="live")
        with block:
            return passes.logprobs(mini)

    def _backward(self, mini: MiniBatch, scored: Sequence[Scored], totals: Totals) -> tuple[Tensor, LossSums]:
        config, device = self._config, self._ranks.device
        found = torch.zeros(1 + len(SUMS), dtype=torch.float64, device=device)

        def loss_of(number: int, now_T: Tensor) -> Tensor:
            slots = slots_of(now_T, mini.micro[number], scored[number], device, mini.version)
            loss, sums = policy_loss(slots, config.loss, totals, config.reference.kl)
            found.add_(torch.stack([loss.detach().double(), *(getattr(sums, name) for name in SUMS)]))
            return loss

        routes = [old.routes for old in scored] if config.replay != "off" else None
        measured = self._measured(mini) if config.loss.old == "rollout" else contextlib.nullcontext()
        with measured, self._replaying(mini, routes, forward_only=False):
            self._passes.backward(mini, loss_of)
        loss, *sums = self._passes.from_last_stage(found)
        return loss, LossSums(*sums)

    def _clip(self) -> Tensor:
        gradients.sum_gradients(self._chunk)
        gradients.drop_padding(self._chunk, self.model.get_input_embeddings().padding_idx)
        return gradients.clip(self._chunk, self._config.optimizer.max_grad_norm)

    def _weights_changed(self) -> None:
        self._loaded.precision.changed()

    @contextlib.contextmanager
    def _replaying(
        self, mini: MiniBatch, routes: list[Any] | None, forward_only: bool, agreement: bool = False
    ) -> Iterator[None]:
        """Return the context of one schedule; the routing is live if there are no routes to replay."""
        if routes is None:
            if self._ranks.piece == 0:  # the other ranks of the replica run the same tokens
                for micro in mini.micro:
                    rows = int((micro.whole.labels != NO_LABEL).sum())
                    self._beside += self._beside.new_tensor(Stats.live(self.spec.layers, rows).counts())
            yield
            return
        shape, on_missing = Shape.of(mini).arguments, self._config.rollout.on_missing
        with self.replayer.replay(
            routes, **shape, forward_only=forward_only, on_missing=on_missing, agreement=agreement
        ):
            yield

    # -- counts ---------------------------------------------------------------------------------

    def route_counts(self) -> Stats:
        """Return the Stats of all passes since the last call, summed over ranks. Waits for the device.

        Call it once per step, on all ranks.
        """
        stats = self.replayer.stats_of_all_ranks()
        beside = Stats.from_counts(stats.layers, self._ranks.sum(self._beside).tolist())
        found = stats.since(self._counted) + beside
        self._counted, self._beside = stats, self._no_counts()
        return found

    def router_figures(self) -> RouterFigures | None:
        """Return how the routers used their experts since the last call, over all ranks. Waits for the device."""
        if not self._config.trainer.routing_metrics:
            return None
        return RouterFigures.from_sums(self.spec, self.replayer.sums_of_all_ranks())

    def _measured(self, mini: MiniBatch) -> contextlib.AbstractContextManager[None]:
        """Return a block that measures the routers on the tokens of `mini` that count."""
        if not self._config.trainer.routing_metrics:
            return contextlib.nullcontext()
        cut, rows = self.replayer.layout.cut_mask, Shape.of(mini).rows
        masks = [cut(counted_slots(micro.whole), len(micro.whole), rows) for micro in mini.micro]
        return self.replayer.measure(masks)

    def _no_counts(self) -> Tensor:
        """Return the counts (`Stats.counts`) of passes that the replayer does not count, all zero."""
        nothing = Stats.live(self.spec.layers, 0).counts()
        return torch.zeros(len(nothing), dtype=torch.int64, device=self._ranks.device)

    def _compare(self, mini: MiniBatch, own: Sequence[Share]) -> None:
        """Count on the device in how many rows the engine's experts equal the model's own, per layer of this rank."""
        layout, layers = self.replayer.layout, self.spec.layers
        columns = [layers.index(layer) - len(layers) for layer in layout.layers]
        for micro, share in zip(mini.micro, own, strict=True):
            if micro.routes is None:
                continue
            if self._ranks.piece == 0:
                self._beside[1] += int(micro.routes.captured.sum())
            theirs = layout.share(micro.routes, share.sequences).rows
            if theirs is None:  # a stage without routed layers
                continue
            engine = TensorRoutes.from_routes(theirs, self._ranks.device)
            sets = [rows.ids.to(torch.int32).sort(-1).values for rows in (engine, share.rows)]
            same_TL = (sets[0] == sets[1]).all(-1) & engine.captured[:, None]
            self._beside[columns] += same_TL.sum(0)

    # -- state ----------------------------------------------------------------------------------

    def shards(self) -> Shards:
        """Return this rank's parts; a gathered tensor is on the first rank's CPU. All ranks must call it."""
        named, state = dict(self._chunk.named_parameters()), self.optimizer.state

        def gather(name: str, moment: str = "") -> Tensor | None:
            values = {one: state[held][moment] for one, held in named.items()} if moment else named
            return self._collector.collect(name, values)

        like = {name: torch.empty(shape, device="meta") for name, shape in self._loaded.shapes.items()}
        steps = {name: next(iter(state.values()))["step"] for name in like} if state else {}
        return Shards(like, steps, gather)

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load this rank's share of the optimizer's state."""
        for name, parameter in self._chunk.named_parameters() if state else ():
            parts = weights.parts_of(self._chunk, name)
            held: dict[str, Tensor] = {moment: torch.empty_like(parameter) for moment in MOMENTS}
            for moment, tensor in held.items():
                weights.fill(tensor, parts, {part.name: state[part.name][moment] for part in parts})
            held["step"] = state[parts[0].name]["step"].to(parameter.device, copy=True)
            self.optimizer.state[parameter] = held
