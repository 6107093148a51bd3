"""RouterSite applies the routes of a micro-batch to one router of a Megatron model.

Megatron's router asks the object in its `router_replay` attribute for the choice of experts. A RouterSite puts a Choice
there for the time of one call, and takes the router's own rule for everything else: scores, gate weights, scaling.

Shapes: T tokens, K top-k, E experts, s positions, b sequences.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from router_replay.errors import ReplayError
from router_replay.replay.megatron.routers import MegatronRouter
from router_replay.replay.router_scores import distribution_of, figures_of
from router_replay.replay.state import Column, Plan, State
from router_replay.replay.wrapper import Wrapper

NO_CHANGE = object()


@dataclasses.dataclass
class Use:
    """Counts how one chunk used the rows of one micro-batch; keys are the absolute ids of layers.

    `trains` says whether the pass ran with gradients. `to_recompute` are the layers whose forward ran in a checkpoint
    then, and `recomputed` counts their recomputes.
    """

    micro_batch: int
    trains: bool = False
    to_recompute: set[int] = dataclasses.field(default_factory=set)
    recomputed: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(eq=False)
class MicroBatchPlan(Plan):
    """Holds the routes of one micro-batch for one chunk. One forward pass uses it, and the recompute of that pass.

    `effective` holds the ids [T, K] that a layer used, by column, if some rows were routed live: the recompute takes
    them from here, since a live choice is not guaranteed to come out the same twice.
    """

    use: Use = dataclasses.field(default_factory=lambda: Use(0))
    sequences: int = 1
    padding_T: Tensor | None = None
    effective: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def move(self, device: torch.device) -> None:
        """Move all tensors to `device`."""
        super().move(device)
        self.padding_T = None if self.padding_T is None else self.padding_T.to(device)


class ScoresOf(torch.autograd.Function):
    """Computes scores_TE.gather(1, ids_TK). Like top-k, it keeps only the ids for backward.

    `gather` of torch also keeps the scores [T, E], of which its backward only needs the shape. A router that applies
    softmax to the chosen logits alone has no other use for them, so every layer would hold them until its backward.
    """

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the scores [T, K] of the experts `ids_TK`."""
        ctx.save_for_backward(ids_TK)
        ctx.shape = scores_TE.shape
        return scores_TE.gather(1, ids_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the scores."""
        (ids_TK,) = ctx.saved_tensors
        return grad_TK.new_zeros(ctx.shape).scatter_add_(1, ids_TK, grad_TK), None


class Choice:
    """Answers one call of a router in place of Megatron's own RouterReplay.

    `ids_TK` are the recorded ids (int64), or None to let the router choose. `live_T1` is True for rows without
    recorded ids. With `compare`, the live choice is also kept, in `live_TK`. `chosen_TK` holds the ids that were used.
    """

    def __init__(self, ids_TK: Tensor | None, live_T1: Tensor | None, compare: bool) -> None:
        self.ids_TK = ids_TK
        self.live_T1 = live_T1
        self.compare = compare
        self.chosen_TK: Tensor | None = None
        self.live_TK: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the ids of the chosen experts; Megatron's router calls this with its own top-k.

        `scores` are [T, E], `topk` is the number of experts, `num_groups` and `group_topk` belong to group-limited
        routing, and `default_compute_topk` chooses as the router would.
        """
        assert default_compute_topk is not None
        if self.ids_TK is None:
            values, self.chosen_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            return values, self.chosen_TK
        ids_TK = self.ids_TK
        if self.live_T1 is not None or self.compare:
            with torch.no_grad():  # a recompute does not compare, and must save the same tensors
                self.live_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
            if self.live_T1 is not None:
                ids_TK = torch.where(self.live_T1, self.live_TK, ids_TK)
        self.chosen_TK = ids_TK
        return cast(Tensor, ScoresOf.apply(scores, ids_TK)), ids_TK


class RouterSite(Wrapper):
    """Wraps `routing` of the router whose routes are column `column` of its chunk's plans and recordings."""

    def __init__(self, router: MegatronRouter, column: int, state: State) -> None:
        super().__init__(router.name, router.module, "routing")
        self.router = router
        self.column = Column(column)
        self.state = state
        self.used = False  # True once the router chose in the current pass
        self.shape: tuple[int, int] = (0, 0)  # [s, b] of the current pass
        self.chosen_TK: Tensor | None = None  # the choice of the current pass, in the narrow dtype, if one records
        self.measured: tuple[Tensor, Tensor] | None = None  # figures [2, T] and choice [T, K], if one measures

    def __call__(self, logits: Tensor, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Route with the active routes. `logits` are [s, b, E]; `padding_mask` [s, b] is True for padding."""
        found, first_time = self.state.decide()
        plan = cast(MicroBatchPlan | None, found)
        if plan is None and not (first_time and (self.state.recordings or self.state.measuring)):
            return self.original(logits, *args, padding_mask=padding_mask, **kwargs)
        if first_time:
            self._refuse_second_call()
            self.shape = (logits.shape[0], logits.shape[1])
        choice = self._choice(plan, first_time, logits)
        padding_mask = _with_padding(plan, padding_mask, logits)
        count = count_without_padding(self.module) if padding_mask is not None else NO_CHANGE
        with swapped(self.module, router_replay=choice, _apply_expert_bias=count):
            out = self.original(logits, *args, padding_mask=padding_mask, **kwargs)
        self._note(plan, first_time, choice)
        if first_time and self.state.measuring and choice.chosen_TK is not None:
            self._measure(logits, choice.chosen_TK)
        return out

    def _measure(self, logits: Tensor, chosen_TK: Tensor) -> None:
        """Keep the figures of the pass; a bias that only takes part in the choice is no part of them."""
        is_sigmoid = cast(Any, self.module).score_function == "sigmoid"
        with torch.no_grad():
            probabilities_TE = distribution_of(logits.detach().reshape(-1, logits.shape[-1]), is_sigmoid=is_sigmoid)
            self.measured = figures_of(probabilities_TE, chosen_TK), chosen_TK.detach()

    def _choice(self, plan: MicroBatchPlan | None, first_time: bool, logits: Tensor) -> Choice:
        if plan is None:
            return Choice(None, None, False)
        self._refuse_other_rows(plan, logits)
        if plan.ids_TLK.device != logits.device:  # Megatron moves weights that were made on the host in the first pass
            plan.move(logits.device)
        if not first_time and self.column.number in plan.effective:
            return Choice(plan.effective[self.column.number].long(), None, False)
        return Choice(plan.column(self.column), plan.live_T1, first_time and plan.agree_L is not None)

    def _note(self, plan: MicroBatchPlan | None, first_time: bool, choice: Choice) -> None:
        """Keep what the call did: for the recompute, for the counters and for the recordings."""
        if choice.chosen_TK is None:
            if first_time:
                return  # `used` stays False, and the pass raises an error with all such layers
            raise ReplayError(
                f"the router of layer {self.router.layer} did not choose experts in the recompute of backward, so its "
                "routes were not used: the recompute must run the same code as the forward pass"
            )
        if not first_time:
            if plan is not None:
                plan.use.recomputed[self.router.layer] += 1
            return
        self.used = True
        if self.state.recordings:
            self.chosen_TK = choice.chosen_TK.detach().to(self.state.recordings[0].dtype)
        if plan is None:
            return
        if (
            plan.use.trains and not torch.is_grad_enabled()
        ):  # Megatron's checkpoints run their forward without gradients
            plan.use.to_recompute.add(self.router.layer)
            if plan.live_T1 is not None:
                plan.effective[self.column.number] = choice.chosen_TK.detach().to(plan.ids_TLK.dtype)
        if choice.ids_TK is not None:
            plan.compare(self.column, choice.live_TK)

    def _refuse_other_rows(self, plan: MicroBatchPlan, logits: Tensor) -> None:
        positions, sequences = logits.shape[:2]
        if (positions * sequences, sequences) != (len(plan), plan.sequences):
            raise ReplayError(
                f"layer {self.router.layer}, micro-batch {plan.use.micro_batch}: the router got {positions} positions "
                f"of {sequences} sequences, the routes have {len(plan) // plan.sequences} positions of "
                f"{plan.sequences} sequences on this rank: use the tokens and the routes of the same micro-batch, and "
                "pass the micro_batch_size of the schedule (1 for packed sequences)"
            )

    def _refuse_second_call(self) -> None:
        if self.used:
            raise ReplayError(
                f"the router of layer {self.router.layer} was called twice in one forward pass, but there is one row "
                "per token: replay and record support only models that run each layer once"
            )


def _with_padding(plan: MicroBatchPlan | None, given: Tensor | None, logits: Tensor) -> Tensor | None:
    """Return the mask [s, b] of the rows that no counter may count: the plan's, and those `given` by the model."""
    if plan is None or plan.padding_T is None:
        return given
    own = plan.padding_T.reshape(logits.shape[:2])
    return own if given is None else own | given.bool()


def count_without_padding(module: nn.Module) -> Callable[..., None]:
    """Return a replacement of `_apply_expert_bias` of the router `module` that leaves padding out of the counts.

    That of megatron-core 0.16.1 combines a map [T, E] with a mask [T], which fails or masks experts instead of tokens.
    """

    def count(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        kept = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
        cast(Any, type(module))._apply_expert_bias(module, kept)

    return count


@contextlib.contextmanager
def swapped(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Set `attributes` of the module's own __dict__ for one call, and restore them after it."""
    before = {name: module.__dict__.get(name, NO_CHANGE) for name in attributes}
    module.__dict__.update({name: value for name, value in attributes.items() if value is not NO_CHANGE})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not NO_CHANGE:
                module.__dict__[name] = value
            else:
                module.__dict__.pop(name, None)
