"""ChunkPass runs each forward pass of a model chunk with the rows of its micro-batch, and checks their use after it.

All schedules of Megatron (no pipelining, 1F1B, interleaved 1F1B) run the micro-batches of one chunk in order, with
backward passes and other chunks in between. So pass n of a chunk belongs to micro-batch n. A recompute in backward
finds the rows of its own forward by its checkpoint (`replay.checkpoint_calls`): there is no queue that a failed or a
forward-only pass could leave filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from router_replay.batch.megatron import Share
from router_replay.batch.tensors import TensorRoutes, on_device
from router_replay.errors import ReplayError, shorten
from router_replay.replay.gauge import Measuring, RouterGauge
from router_replay.replay.megatron.routers import Chunk
from router_replay.replay.megatron.site import MicroBatchPlan, RouterSite, Use
from router_replay.replay.replayable import count_rows
from router_replay.replay.state import Recording, State
from router_replay.replay.stats import Counters
from router_replay.replay.wrapper import Wrapper
from router_replay.routes import Routes
from router_replay.spec import RouterSpec


class Schedule:
    """Holds the shares of all micro-batches of one replay block, on the host, and what each chunk used of them.

    A share goes to the device when its pass begins, in one or two bytes per id, and is free again after the pass, or
    after the recompute of the pass.
    """

    def __init__(self, shares: Sequence[Share], chunks: Sequence[Chunk], agreement: bool) -> None:
        self.shares = shares
        self.agreement = agreement
        self.uses: dict[int, list[Use]] = {chunk.number: [] for chunk in chunks if chunk.routers}

    def plan(self, chunk: Chunk, spec: RouterSpec, device: torch.device) -> MicroBatchPlan:
        """Return the plan of the next pass of `chunk`, whose routers `spec` describes."""
        number = len(self.uses[chunk.number])
        if number == len(self.shares):
            raise ReplayError(
                f"chunk {chunk.number} runs forward pass {number + 1} in this block, which was given {number} "
                "micro-batches: give one entry per micro-batch, and open a new block for other passes"
            )
        share = self.shares[number]
        rows = _of_layers(share.rows, spec)
        tensors = TensorRoutes.from_routes(rows, device) if isinstance(rows, Routes) else rows
        plan = MicroBatchPlan.of(rows, tensors, count_rows(rows, share.idle), agreement=self.agreement, start=0)
        assert isinstance(plan, MicroBatchPlan)
        plan.use = Use(number, torch.is_grad_enabled())
        plan.sequences = share.sequences
        plan.padding_T = None if share.padding is None else on_device(share.padding, device)
        return plan

    def done(self, chunk: Chunk, plan: MicroBatchPlan) -> None:
        """Note that the pass of `plan` is complete."""
        self.uses[chunk.number].append(plan.use)

    def refuse_unused(self, chunks: Sequence[Chunk], forward_only: bool | None) -> None:
        """Raise ReplayError unless every chunk used the rows of every micro-batch as often as it must.

        `forward_only` is the argument of the schedule, None if it is not known: then either every layer that ran in a
        checkpoint was recomputed, or none was.
        """
        every = [(chunk, use) for chunk in chunks if chunk.routers for use in self.uses[chunk.number]]
        for chunk in chunks:
            used = len(self.uses.get(chunk.number, self.shares))
            if used < len(self.shares):
                raise ReplayError(
                    f"layers [{shorten(chunk.layers)}] (chunk {chunk.number}) did not use the rows of micro-batch "
                    f"{used}: {len(self.shares)} micro-batches were given, and {used} forward passes ran. Give as many "
                    "as the schedule runs (num_microbatches)"
                )
        backward = any(use.recomputed for _, use in every) if forward_only is None else not forward_only
        for _, use in every:
            for layer in sorted(use.to_recompute):
                expected, got = int(backward), use.recomputed[layer]
                if got != expected:
                    raise ReplayError(
                        f"layer {layer}, micro-batch {use.micro_batch}: the rows were used in {got} recomputes of "
                        f"backward, expected {expected}: close the block after the backward passes of all "
                        "micro-batches, or before all of them"
                    )


class ChunkRecording(Recording):
    """Collects the choices of a chunk in a record block; `shapes` has the [s, b] of each pass."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self.shapes: list[tuple[int, int]] = []


class ChunkPass(Wrapper):
    """Wraps the decoder of one chunk; one call is the forward pass of one micro-batch."""

    def __init__(self, chunk: Chunk, spec: RouterSpec) -> None:
        super().__init__(chunk.name, chunk.decoder)
        self.chunk = chunk
        self.spec = spec.select(chunk.layers)
        self.state = State()
        self.sites = [RouterSite(router, column, self.state) for column, router in enumerate(chunk.routers)]
        self.counters = Counters(self.spec.layers)
        self.gauge = RouterGauge(self.spec)
        self.schedule: Schedule | None = None  # that of the open replay block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass with the rows of its micro-batch; if it fails, its recorded rows are dropped."""
        state, schedule = self.state, self.schedule
        if schedule is None and not state.recordings and not state.measuring:
            return self.original(*args, **kwargs)
        state.refuse_elsewhere("run a forward pass")
        plan = None if schedule is None else schedule.plan(self.chunk, self.spec, self._device())
        for site in self.sites:
            site.used = False
            site.chosen_TK = site.measured = None
        with contextlib.ExitStack() as stack:
            if plan is not None:
                stack.enter_context(state.block(plan))
                stack.enter_context(self.counters.counting(plan))
            out = self.original(*args, **kwargs)
            self._refuse_unused()
            if plan is not None and schedule is not None:
                plan.count_agreement()
                plan.passes += 1
                schedule.done(self.chunk, plan)
        self._record()
        for measuring in state.measuring:
            self._measure(measuring)
        return out

    def _device(self) -> torch.device:
        weight = self.sites[0].module.weight
        assert isinstance(weight, Tensor)
        return weight.device

    def _refuse_unused(self) -> None:
        unused = [site.router.layer for site in self.sites if not site.used]
        if unused:
            raise ReplayError(
                f"the routers of layers {unused} did not ask for experts in this pass, so their routes were not used: "
                "a patch or a fused kernel runs in place of the router. Switch it off"
            )

    def _measure(self, measuring: Measuring) -> None:
        """Add the figures of a complete pass, whose mask is the next of the block."""
        measured = [site.measured for site in self.sites if site.measured is not None]
        counted_T = on_device(next(measuring.counted_T), self._device())
        measuring.gauge.add([figures for figures, _ in measured], [chosen for _, chosen in measured], counted_T)

    def _record(self) -> None:
        """Give the choices of a complete pass to the recordings."""
        for recording in self.state.recordings:
            for site in self.sites:
                assert site.chosen_TK is not None
                recording.add(site.column.number, site.chosen_TK)
            assert isinstance(recording, ChunkRecording)
            recording.shapes.append(self.sites[0].shape)


def _of_layers(rows: Routes | TensorRoutes, spec: RouterSpec) -> Routes | TensorRoutes:
    """Return the columns of one chunk out of the columns of its rank."""
    if rows.spec == spec:
        return rows
    if isinstance(rows, Routes):
        return rows.select_layers(spec.layers)
    columns = [rows.spec.layers.index(layer) for layer in spec.layers]
    return TensorRoutes(rows.ids[:, columns], rows.captured, spec, rows.all_captured, rows.any_captured)
