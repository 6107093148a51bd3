"""State tracks the open blocks of a model, and the routes that a recompute must use again.

A `Plan` holds the routes of one `replay` block, or those that a `follow` block found for one pass. A `Recording`
collects the choices of one `record` block. A `State` belongs to one RouterReplay. It is stored on that object and not
per thread, since backward may run in another thread.

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay.checkpoint_calls import surrounding_checkpoints
from router_replay.replay.gauge import Measuring
from router_replay.replay.opener import Opener
from router_replay.route_source import RouteSource
from router_replay.spec import RouterSpec

COMPARED_AT_ONCE = 1 << 26  # pairs of ids in one comparison of routes with the live choice; each takes a byte
HELD_AT_ONCE = 1 << 22  # ids of live choices that wait to be narrowed; each takes eight bytes
CANNOT_PROVE = (
    "a checkpointed layer is recomputed in backward, and it is not known which routes its forward pass used. Use "
    "model.gradient_checkpointing_enable(), torch.utils.checkpoint.checkpoint or checkpoint_wrapper, or pass "
    "context_fn=replayer.checkpoint_context to torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


@dataclasses.dataclass(eq=False)
class Plan:
    """Holds the routes of one replay block, on the model's device in their narrow dtype.

    `live_T1` is True where the router chooses, because a row is missing; None means nowhere. This decides once whether
    layers need their live choice, so that no layer has to read from the device.
    """

    ids_TLK: Tensor
    live_T1: Tensor | None
    rows_replayed: int | Tensor  # per pass; a tensor if the count is only on the device
    rows_live: int | Tensor
    start: int = 0  # how many tokens the KV cache holds before the token of the first row
    from_host: bool = False  # came as numpy: moves to the device of the pass (unknown with offloaded parameters)
    captured_T: Tensor | None = None  # the rows that agreement is about; None means all
    agree_L: Tensor | None = None  # captured rows that equal the live choice as sets, all passes; None: not requested
    live_LTK: Tensor | None = None  # the live choice in the current pass, to be compared after it
    held: list[tuple[int, Tensor]] = dataclasses.field(default_factory=list)  # column and live choice, not yet in it
    passes: int = 0
    compiled_passes: Tensor | None = None  # counted on the device: a Python int would be a constant of the graph
    was_compiled: bool = False  # True once a compiled pass was counted there

    @classmethod
    def of(
        cls,
        rows: RouteSource | TensorRoutes,
        tensors: TensorRoutes,
        counts: tuple[Any, Any],
        *,
        agreement: bool,
        start: int,
    ) -> Plan:
        """Return the plan for rows that fit the model.

        `tensors` are the same rows on a device; `counts` are the numbers of replayed and of live rows.
        """
        where, layers = tensors.device, len(rows.spec.layers)
        live_LTK = None
        if agreement:
            shape = (layers, len(rows), rows.spec.top_k)
            live_LTK = torch.zeros(shape, dtype=signed(tensors.ids).dtype, device=where)
        return cls(
            ids_TLK=tensors.ids,
            live_T1=None if rows.all_captured or tensors.completed else ~tensors.captured.unsqueeze(-1),
            rows_replayed=counts[0],
            rows_live=counts[1],
            start=start,
            from_host=isinstance(rows, RouteSource),
            captured_T=tensors.captured if agreement and not rows.all_captured else None,
            agree_L=torch.zeros(layers, dtype=torch.int64, device=where) if agreement else None,
            live_LTK=live_LTK,
            compiled_passes=torch.zeros((), dtype=torch.int64, device=where),
        )

    def __len__(self) -> int:
        return self.ids_TLK.shape[0]

    def move(self, device: torch.device) -> None:
        """Move all tensors to `device`."""
        self.ids_TLK = self.ids_TLK.to(device)
        self.live_T1 = None if self.live_T1 is None else self.live_T1.to(device)
        self.captured_T = None if self.captured_T is None else self.captured_T.to(device)
        self.agree_L = None if self.agree_L is None else self.agree_L.to(device)
        self.live_LTK = None if self.live_LTK is None else self.live_LTK.to(device)
        self.compiled_passes = None if self.compiled_passes is None else self.compiled_passes.to(device)

    def column(self, index: Column) -> Tensor:
        """Return the ids of one routed layer, [T, K], widened to int64 only here."""
        if not torch.compiler.is_compiling():
            return self.ids_TLK.select(1, index.number).long()
        column_TK = signed(self.ids_TLK).index_select(1, index.tensor_1).squeeze(1).long()
        return column_TK & 0xFFFF if self.ids_TLK.dtype == torch.uint16 else column_TK

    @property
    def holds_choice(self) -> bool:
        """Whether `choice_TLK` is there after a pass: no row is missing, or the live choice of all rows is kept."""
        return self.live_T1 is None or self.live_LTK is not None

    def choice_TLK(self) -> Tensor:
        """Return the ids that the routers used in the last pass: the recorded ones, and the live choice elsewhere."""
        if self.live_T1 is None:
            return self.ids_TLK
        assert self.live_LTK is not None
        if not torch.compiler.is_compiling():
            self.narrow_held()
        mixed = torch.where(self.live_T1.unsqueeze(-1), self.live_LTK.transpose(0, 1), signed(self.ids_TLK))
        return mixed.view(self.ids_TLK.dtype)

    def compare(self, index: Column, live_TK: Tensor | None) -> None:
        """Keep the live choice `live_TK` of a layer. `count_agreement` compares all layers at once, after the pass.

        A layer launches no kernel for it: passes of few tokens wait for the launches. The choices of several layers are
        narrowed together.
        """
        if self.live_LTK is None or live_TK is None:
            return
        if torch.compiler.is_compiling():
            self.live_LTK.index_copy_(0, index.tensor_1, live_TK.to(self.live_LTK.dtype).unsqueeze(0))
            return
        self.held.append((index.number, live_TK))
        if len(self.held) * live_TK.numel() >= HELD_AT_ONCE:
            self.narrow_held()

    def narrow_held(self) -> None:
        """Write the live choices that are held into `live_LTK`."""
        held, self.held = self.held, []
        if held and self.live_LTK is not None:
            first, last = held[0][0], held[-1][0]
            if [number for number, _ in held] == list(range(first, last + 1)):
                self.live_LTK[first : last + 1].copy_(torch.stack([live_TK for _, live_TK in held]))
            else:
                for number, live_TK in held:
                    self.live_LTK[number].copy_(live_TK)

    def count_agreement(self, index: Column | None = None) -> None:
        """Count the rows whose experts are the live choice, of all layers or of one; only reading the stats waits."""
        if self.agree_L is None or self.live_LTK is None:
            return
        if not torch.compiler.is_compiling():
            self.narrow_held()
        count, tokens, top_k = self.live_LTK.shape
        layers = range(count) if index is None else range(index.number, index.number + 1)
        at_once = max(1, COMPARED_AT_ONCE // max(1, tokens * top_k**2))
        ids_LTK = signed(self.ids_TLK).transpose(0, 1)
        for first in layers[::at_once]:
            some = slice(first, min(first + at_once, layers.stop))
            same_lTKK = ids_LTK[some].unsqueeze(-1) == self.live_LTK[some].unsqueeze(-2)
            same_lT = same_lTKK.any(-1).all(-1)
            if self.captured_T is not None:
                same_lT = same_lT & self.captured_T
            self.agree_L[some] += same_lT.sum(1)


def signed(ids: Tensor) -> Tensor:
    """Return `ids` with numbers that torch can select and compare: unsigned ones of two bytes are read as signed."""
    return ids.view(torch.int16) if ids.dtype == torch.uint16 else ids


class Column:
    """Holds the position of a router's routes in a plan, as a number and as a tensor [1] on the model's device.

    Compiled code uses the tensor. A number would be a constant of the compiled graph, so that every layer would need a
    graph of its own, and torch gives up after eight.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor_1 = torch.tensor([number])

    def move(self, device: torch.device) -> None:
        """Move the tensor to `device`; nothing happens if it is there."""
        if self.tensor_1.device != device:
            self.tensor_1 = self.tensor_1.to(device)


class PlanPerPass(Protocol):
    """Makes a plan for each forward pass of a `follow` block, from the arguments of the decoder."""

    def plan_for(self, stack: nn.Module, args: Any, kwargs: dict[str, Any]) -> Plan | None:
        """Return the plan of a pass of the decoder `stack` with these arguments; None for a live pass."""

    def passed(self) -> None:
        """Count the pass of the last plan; it is called after the pass, unless that failed."""


class Recording:
    """Collects the choices of the passes in a record block, in the narrow dtype: a list of pieces per routed layer."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self.dtype = getattr(torch, spec.dtype.name)
        self.pieces: list[list[Tensor]] = [[] for _ in spec.layers]

    def add(self, column: int, chosen_TK: Tensor) -> None:
        """Append the ids that the router of column `column` chose in one call."""
        self.pieces[column].append(chosen_TK.detach().to(self.dtype))

    def drop_after(self, lengths: list[int]) -> None:
        """Drop the pieces of a pass that failed; `lengths` are the numbers of pieces per layer before it."""
        for column, length in zip(self.pieces, lengths, strict=True):
            del column[length:]


@dataclasses.dataclass(eq=False)
class Block:
    """Describes one open `replay`, `follow`, `record` or `measure` block."""

    contents: Plan | PlanPerPass | Recording | Measuring
    opener: Opener


class State:
    """Holds the open blocks of one model, innermost last, and the plan and recordings that they make active."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.plan: Plan | None = None  # the active routes
        self.follows: PlanPerPass | None = None  # makes the plan of each pass, where the innermost block follows
        self.recordings: tuple[Recording, ...] = ()
        self.measuring: tuple[Measuring, ...] = ()
        self.passing = False  # True while a forward pass of the decoder runs
        self.recomputing = False  # True while a layer that remembers its plan is recomputed in backward
        self.detached = False
        self.was_used = False  # True once a block has been opened
        # A compiled pass cannot read its thread id, but torch guards on this attribute before it runs one.
        self.here = threading.local()
        # The plan that the forward of each checkpoint used, kept while its graph is alive.
        self.used: weakref.WeakKeyDictionary[Any, Plan | None] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def block(self, contents: Plan | PlanPerPass | Recording | Measuring) -> Iterator[None]:
        """Keep `contents` active while the block is open.

        Blocks must be nested and belong to the code that opened them; otherwise ReplayError is raised.
        """
        self.refuse_detached()
        self.refuse_elsewhere("open a block")
        block = Block(contents, Opener.here())
        self.blocks.append(block)
        self._changed()
        try:
            yield
        finally:
            innermost = self.blocks[-1] is block
            self.blocks.remove(block)
            self._changed()
            if not innermost:
                raise ReplayError(
                    "replay and record blocks must close in the reverse order of their opening; this one closed before "
                    "a block that was opened inside it, so passes in between used the routes of the inner one"
                )

    def refuse_elsewhere(self, what: str) -> None:
        """Raise ReplayError unless the caller is the thread, task or generator that opened the innermost block.

        Only that one may run passes or open another block. `what` names the refused action in the message.
        """
        reason = self.blocks[-1].opener.elsewhere(Opener.here()) if self.blocks else ""
        if reason:
            raise ReplayError(
                f"cannot {what} here: {reason} has a replay or record block open on this model, and the routes of one "
                "batch must not reach another. Close that block first, or give each its own model"
            )

    def opened_here(self) -> bool:
        """Return whether this thread opened the innermost block. It can be called while torch compiles."""
        return getattr(self.here, "depth", 0) == len(self.blocks)

    def decide(self) -> tuple[Plan | None, bool]:
        """Return the plan for the current router call, and whether it is a forward call (not a recompute).

        Raises ReplayError for a recompute if the plan of its forward is not known.
        """
        if torch.compiler.is_compiling():
            if self.was_used and not self.passing and not self.recomputing:
                raise ReplayError(CANNOT_PROVE)
            return self.plan, not self.recomputing
        if self.recomputing:
            return self.plan, False
        entered, recomputed = surrounding_checkpoints()
        if recomputed is not None:
            if self.was_used and recomputed not in self.used:
                raise ReplayError(CANNOT_PROVE)
            plan = self.used.get(recomputed)
        elif in_backward() and self.was_used:
            raise ReplayError(CANNOT_PROVE)
        else:
            plan = self.plan
        for checkpoint in entered:
            self.used[checkpoint] = plan
        return plan, recomputed is None

    def is_recompute(self) -> bool:
        """Return whether the current call is a recompute in backward."""
        if self.recomputing or torch.compiler.is_compiling():
            return self.recomputing
        return surrounding_checkpoints()[1] is not None

    @contextlib.contextmanager
    def recompute(self, plan: Plan | None) -> Iterator[None]:
        """Make `plan`, which the forward of a layer used, active while the layer is recomputed in backward."""
        before = self.plan, self.recomputing
        self.plan, self.recomputing = plan, True
        try:
            yield
        finally:
            self.plan, self.recomputing = before

    def detach(self) -> None:
        """Refuse all later blocks. Raises ReplayError if a block or a graph still needs the wrappers."""
        if self.blocks:
            raise ReplayError("detach() was called inside a replay or record block: close the block first")
        if any(plan is not None for plan in self.used.values()):
            raise ReplayError(
                "detach() was called before the backward pass of a replayed forward with checkpoints, which would be "
                "recomputed with live routes. First run the backward pass, or delete the loss and the outputs"
            )
        self.detached = True

    def refuse_detached(self) -> None:
        """Raise ReplayError after `detach`."""
        if self.detached:
            raise ReplayError("this RouterReplay was detached from its model: make a new one")

    def _changed(self) -> None:
        contents = [block.contents for block in self.blocks]
        innermost = next((one for one in reversed(contents) if not isinstance(one, Recording | Measuring)), None)
        self.plan = innermost if isinstance(innermost, Plan) else None
        self.follows = None if isinstance(innermost, Plan) else innermost
        self.recordings = tuple(one for one in contents if isinstance(one, Recording))
        self.measuring = tuple(one for one in contents if isinstance(one, Measuring))
        self.here.depth = len(self.blocks)
        self.was_used = self.was_used or bool(self.blocks)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1
