"""MegatronReplay makes a Megatron-core model use given expert choices, and records the choices it makes.

    replayer = MegatronReplay(model_chunks)
    shape = dict(num_microbatches=4, micro_batch_size=1, seq_length=4096)
    with replayer.replay(micro_batches, **shape):
        forward_backward_func(forward_step_func=step, data_iterator=data, model=model_chunks, **shape)
    replayer.stats.rows_replayed

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from torch import nn

from router_replay.batch import Batch, LocalBatch
from router_replay.batch.megatron import MegatronLayout, Share
from router_replay.batch.sharding import ShardKind
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import BatchError, ReplayError
from router_replay.replay.gauge import Measuring
from router_replay.replay.megatron.passes import ChunkPass, ChunkRecording, Schedule
from router_replay.replay.megatron.recorded import MegatronRecorded, refuse_unknown_boundaries
from router_replay.replay.megatron.routers import find_routers
from router_replay.replay.replayable import refuse_missing, rows_and_masks
from router_replay.replay.stats import COUNTS_OF_ALL_LAYERS, Stats
from router_replay.replay.wrapper import Wrapper
from router_replay.spec import RouterSpec


class MegatronReplay:
    """Replays and records routes in the routers of a Megatron model's decoder; all other modules stay unchanged.

    `model_chunks` is the model of this rank, or the list of its chunks with virtual pipeline stages, bare or wrapped
    (DDP, Float16Module). Multi-token prediction is left alone. With pipeline parallelism all ranks must make their
    MegatronReplay together. A `spec` that is passed must equal that of the whole model. With `agreement`, each replayed
    pass also computes the live choice and counts how often both agree. `context_kind` is how context parallelism cuts
    the sequences: "zigzag" or "contiguous". ReplayError is raised if the chunks are not those of one model, if a
    setting would bypass replay, or if they already belong to another MegatronReplay.
    """

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        spec: RouterSpec | None = None,
        *,
        agreement: bool = False,
        context_kind: ShardKind = "zigzag",
    ) -> None:
        self._found = find_routers(model_chunks, context_kind)
        if spec is not None and spec != self._found.spec:
            raise ReplayError(f"spec must equal that of the model's routers: expected {self._found.spec}, got {spec}")
        self._agreement = agreement
        self._detached = False
        self._passes = [ChunkPass(chunk, self._found.spec) for chunk in self._found.chunks if chunk.routers]
        self._wrappers: list[Wrapper] = [*self._passes, *(site for one in self._passes for site in one.sites)]
        for wrapper in self._wrappers:
            wrapper.refuse_second()
        for wrapper in self._wrappers:
            wrapper.install()

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the whole model, over all pipeline stages."""
        return self._found.spec

    @property
    def layout(self) -> MegatronLayout:
        """This rank's layers and tokens. Send it to the process that holds the routes to receive only this share."""
        return self._found.layout

    @property
    def stats(self) -> Stats:
        """The counts of this rank's routers so far. Reading them synchronizes with the device once."""
        found = [one.counters.read() for one in self._passes]
        asked = any(one.agreement is not None for one in found)
        return Stats(
            layers=self.layout.layers,
            passes=max((one.passes for one in found), default=0),
            rows_replayed=tuple(rows for one in found for rows in one.rows_replayed),
            rows_live=tuple(rows for one in found for rows in one.rows_live),
            agreement=tuple(share for one in found for share in one.agreement or ()) if asked else None,
            rows_compared=max((one.rows_compared for one in found), default=0),
        )

    def stats_of_all_ranks(self) -> Stats:
        """Return the counts of the whole model: summed over the ranks with other tokens, for the layers of all stages.

        All ranks must call this together.
        """
        mine, layers = self.stats, self.spec.layers
        nothing = (0,) * len(layers)
        wide = np.array(Stats(layers, mine.passes, nothing, nothing, None, mine.rows_compared).counts())
        rest = mine.counts()[COUNTS_OF_ALL_LAYERS:]
        width, own = len(layers), [layers.index(layer) for layer in mine.layers]
        for kind in range(3):  # rows replayed, rows live, rows that agree
            columns = COUNTS_OF_ALL_LAYERS + kind * width + np.array(own, np.int64)
            wide[columns] = rest[kind * len(own) : (kind + 1) * len(own)]
        counts = self._over_all_ranks(torch.from_numpy(wide).to(self._device()))
        return Stats.from_counts(layers, counts.tolist())

    @contextlib.contextmanager
    def replay(
        self,
        micro_batches: Any,
        *,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        num_microbatches: int | None = None,
        forward_only: bool | None = None,
        on_missing: Literal["raise", "live"] = "raise",
        loss_mask: Any = None,
        idle: Any = None,
        padding: Any = None,
        agreement: bool | None = None,
    ) -> Iterator[MegatronReplay]:
        """Apply routes to the forward passes of one schedule, and to the recompute of these passes in backward.

        `micro_batches` has one entry per micro-batch, in order; a single entry may stand alone. An entry is Routes or a
        batch that holds them, with one row per token of the micro-batch (sequence by sequence, all pipeline stages'
        layers or this rank's), or a Share that was cut by `layout`. The result of `record` holds all entries.

        `micro_batch_size`, `seq_length`, `num_microbatches` and `forward_only` are the arguments of the schedule; those
        that are given are checked before it runs. Packed sequences count as one sequence.

        Missing rows are routed live. `on_missing="raise"` raises ReplayError if a row is missing where `loss_mask` is
        True; "live" allows it. `idle` is True for tokens that predict nothing, which are left out of the count of live
        rows. `padding` is True for padding, which the router's counters (expert bias, load balancing) then leave out;
        it is idle too. Each of the three is a list with one mask [T] per micro-batch; a Batch brings its own.
        `agreement` overrides the setting of the constructor.

        Yields this MegatronReplay. Raises ReplayError if the routes do not fit the model, and at the end of the block
        if a row was not used as often as it must be.
        """
        if on_missing not in ("raise", "live"):
            raise ReplayError(f'on_missing must be "raise" or "live", got {on_missing!r}')
        self._refuse_open("open a replay block")
        entries = _entries(micro_batches)
        nothing_recorded = isinstance(micro_batches, MegatronRecorded) and not self._passes  # a stage without routers
        expected = None if nothing_recorded else num_microbatches
        if expected is not None and len(entries) != expected:
            raise ReplayError(f"expected one entry per micro-batch: the schedule runs {expected}, got {len(entries)}")
        masks = [
            _each(given, len(entries), name)
            for given, name in ((loss_mask, "loss_mask"), (idle, "idle"), (padding, "padding"))
        ]
        shares = [
            self._share(number, entry, micro_batch_size, on_missing, *own)
            for number, (entry, *own) in enumerate(zip(entries, *masks, strict=True))
        ]
        _refuse_nothing_captured(entries)
        self._refuse_lengths(shares, micro_batch_size, seq_length)
        schedule = Schedule(shares, self._found.chunks, self._agreement if agreement is None else agreement)
        for one in self._passes:
            one.schedule = schedule
        try:
            yield self
        finally:
            for one in self._passes:
                one.schedule = None
        schedule.refuse_unused(self._found.chunks, forward_only)

    def cut(
        self, micro_batches: Any, *, micro_batch_size: int = 1, on_missing: Literal["raise", "live"] = "raise"
    ) -> list[Share]:
        """Return this rank's share of every micro-batch, cut as `replay` cuts it, for several calls of `replay`.

        `micro_batches`, `micro_batch_size` and `on_missing` are as in `replay`. Of rows that lie in a store, only this
        rank's are read, and only here.
        """
        entries = _entries(micro_batches)
        shares = [
            self._share(number, entry, micro_batch_size, on_missing, None, None, None)
            for number, entry in enumerate(entries)
        ]
        _refuse_nothing_captured(entries)
        return shares

    @contextlib.contextmanager
    def record(self) -> Iterator[MegatronRecorded]:
        """Record the experts that each forward pass in this block uses, live or replayed.

        Yields a MegatronRecorded, which holds complete passes only: a pass that fails is dropped.
        """
        self._refuse_detached()
        recordings = [ChunkRecording(one.spec) for one in self._passes]
        with contextlib.ExitStack() as stack:
            for one, recording in zip(self._passes, recordings, strict=True):
                stack.enter_context(one.state.block(recording))
            yield MegatronRecorded(self._found, recordings)

    @contextlib.contextmanager
    def measure(self, counted: Sequence[Any]) -> Iterator[None]:
        """Measure what the routers do in the forward passes of one schedule, live or replayed.

        `counted` has one mask per micro-batch, in order, over the tokens of this rank in the order of its routers
        (`layout.cut_mask`), True for the tokens that count. `sums_of_all_ranks` has the result. Nothing is read from
        the device.
        """
        self._refuse_detached()
        with contextlib.ExitStack() as stack:
            for one in self._passes:
                stack.enter_context(one.state.block(Measuring(one.gauge, iter(counted))))
            yield

    def sums_of_all_ranks(self) -> torch.Tensor:
        """Return what `measure` blocks summed since the last call, of all ranks and layers; it begins anew.

        `measure.RouterFigures.from_sums` reads them. All ranks must call this together.
        """
        layers, experts = self.spec.layers, self.spec.num_experts
        wide = torch.zeros(1 + len(layers) * (2 + experts), dtype=torch.float64, device=self._device())
        figures, load = wide[1 : 1 + 2 * len(layers)].view(2, -1), wide[1 + 2 * len(layers) :].view(-1, experts)
        for one in self._passes:
            own, width = [layers.index(layer) for layer in one.spec.layers], len(one.spec.layers)
            sums = one.gauge.take().to(wide.device)
            wide[0] = sums[0]
            figures[:, own] = sums[1 : 1 + 2 * width].view(2, -1)
            load[own] = sums[1 + 2 * width :].view(-1, experts)
        return self._over_all_ranks(wide)

    def detach(self) -> None:
        """Restore the model to its state before this object was made; later replay and record blocks raise.

        Raises ReplayError if a block is open, if a replayed checkpointed forward still awaits its backward, or if
        other code replaced a wrapped method.
        """
        self._refuse_open("detach")
        for wrapper in self._wrappers:
            wrapper.refuse_covered()
        for one in self._passes:
            one.state.detach()
        for wrapper in self._wrappers:
            wrapper.uninstall()
        self._detached = True

    def __repr__(self) -> str:
        spec, layout = self.spec, self.layout
        here = f"layers {layout.layers}" if layout.layers else "no routed layer"
        part = f", part {layout.part} of {layout.parts} of the positions" if layout.parts > 1 else ""
        return f"MegatronReplay({spec.top_k} of {spec.num_experts} experts; on this rank {here}{part})"

    # -- private ----------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        return next(self._found.chunks[0].decoder.parameters()).device

    def _over_all_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums over the ranks with other tokens, with the layers of all stages."""
        if self._found.token_group is None:
            raise ReplayError(
                "the model does not know the ranks with other tokens: set tp_dp_cp and dp_cp in its "
                "ProcessGroupCollection, or use `stats`, which counts this rank alone"
            )
        torch.distributed.all_reduce(sums, group=self._found.token_group)
        # Other stages hold zeros for these layers.
        torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.MAX, group=self._found.pipeline_group)
        return sums

    def _share(
        self, number: int, entry: Any, sequences: int, on_missing: str, loss_mask: Any, idle: Any, padding: Any
    ) -> Share:
        """Return this rank's share of one entry of `replay`, checked against the model."""
        if isinstance(entry, Share):
            own = entry.rows.spec.layers if entry.rows is not None else ()
            if own != self.layout.layers or (entry.rows is not None and entry.rows.spec != self.spec.select(own)):
                raise ReplayError(
                    f"micro-batch {number}: this Share was cut for another rank or model: expected the layers "
                    f"{self.layout.layers}, got {own}"
                )
            if entry.layout is not None and entry.layout != self.layout:
                raise ReplayError(
                    f"micro-batch {number}: this Share was cut for another rank: expected {self.layout}, got "
                    f"{entry.layout}"
                )
        try:
            if isinstance(entry, Share):
                return self._with_masks(entry, on_missing, loss_mask, idle, padding)
            if isinstance(entry, LocalBatch) or (isinstance(entry, Batch) and entry.shard_of is not None):
                raise ReplayError(
                    "expected the whole micro-batch, which is cut here as Megatron cuts it, got a part that was cut "
                    "before: pass the Batch, or a Share of this replayer's layout"
                )
            rows, loss_mask, idle = rows_and_masks(entry, loss_mask, idle)
            if isinstance(rows, TensorRoutes):
                raise ReplayError("expected routes on the host (Routes), got TensorRoutes")
            self._refuse_spec(rows.spec)
            if on_missing == "raise" and loss_mask is not None:
                refuse_missing(rows, loss_mask)
            padding = _padding_of(entry) if padding is None else padding
            idle = padding if idle is None else idle
            boundaries = entry.cu_seqlens if isinstance(entry, Batch) else None
            refuse_unknown_boundaries(self.layout, sequences, boundaries)
            return self.layout.share(rows, sequences, boundaries=boundaries, padding=padding, idle=idle)
        except (ReplayError, BatchError) as error:
            raise ReplayError(f"micro-batch {number}: {error}") from error

    def _with_masks(self, share: Share, on_missing: str, loss_mask: Any, idle: Any, padding: Any) -> Share:
        """Return the share with masks over the whole micro-batch, cut as its rows were; they replace its own."""
        if loss_mask is None and idle is None and padding is None:
            return share
        refuse_unknown_boundaries(self.layout, share.sequences, None)
        tokens = share.tokens * self.layout.parts * self.layout.context_parts
        cut = self.layout.cut_mask
        if on_missing == "raise" and loss_mask is not None and share.rows is not None:
            refuse_missing(share.rows, cut(loss_mask, tokens, share.sequences, name="loss_mask"))
        idle = padding if idle is None else idle
        return dataclasses.replace(
            share,
            padding=share.padding if padding is None else cut(padding, tokens, share.sequences, name="padding"),
            idle=share.idle if idle is None else cut(idle, tokens, share.sequences, name="idle"),
        )

    def _refuse_spec(self, spec: RouterSpec) -> None:
        if spec == self.spec or (self.layout.layers and spec == self.spec.select(self.layout.layers)):
            return
        raise ReplayError(
            f"these routes are of another model: expected {self.spec}, or the layers {self.layout.layers} of this "
            f"rank, got {spec}"
        )

    def _refuse_lengths(self, shares: Sequence[Share], sequences: int, seq_length: int | None) -> None:
        for number, share in enumerate(shares):
            got = share.tokens * self.layout.parts * self.layout.context_parts
            if share.sequences != sequences or (seq_length is not None and got != sequences * seq_length):
                raise ReplayError(
                    f"micro-batch {number}: the schedule runs {sequences} sequences of "
                    f"{'any' if seq_length is None else seq_length} tokens, the routes have {got} rows of "
                    f"{share.sequences} sequences: expected one row per token, padding included"
                )

    def _refuse_open(self, what: str) -> None:
        self._refuse_detached()
        if any(one.schedule is not None for one in self._passes):
            raise ReplayError(f"cannot {what} here: a replay block of this model is open. Close it first")

    def _refuse_detached(self) -> None:
        if self._detached:
            raise ReplayError("this MegatronReplay was detached from its model: make a new one")


def _entries(micro_batches: Any) -> list[Any]:
    if isinstance(micro_batches, MegatronRecorded):
        return list(micro_batches.shares)
    if isinstance(micro_batches, Batch) and micro_batches.num_bins > 1:
        return list(micro_batches.bins())
    return list(micro_batches) if isinstance(micro_batches, list | tuple) else [micro_batches]


def _each(masks: Any, count: int, name: str) -> list[Any]:
    if masks is None:
        return [None] * count
    if count == 1 and not isinstance(masks, list | tuple):
        return [masks]
    if len(masks) != count:
        raise ReplayError(f"{name} must have one mask per micro-batch: expected {count}, got {len(masks)}")
    return list(masks)


def _padding_of(entry: Any) -> np.ndarray | None:
    """Return the mask of padding of a batch; None for bare routes, of which it is not known."""
    return entry.sample_ids < 0 if isinstance(entry, Batch) else None


def _refuse_nothing_captured(entries: Sequence[Any]) -> None:
    """Raise ReplayError if no row of any micro-batch is captured.

    This looks at whole micro-batches: one rank's part may be all padding, and must not stop while others go on.
    """
    rows = [getattr(entry, "routes", entry) for entry in entries if not isinstance(entry, Share)]
    if rows and len(rows) == len(entries) and not any(one.any_captured for one in rows):
        raise ReplayError(
            f"none of the rows of {len(rows)} micro-batches is captured, so nothing would be replayed: for a live "
            "pass, run the schedule outside the block"
        )
