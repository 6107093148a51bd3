"""What is in force in a model now, and the wrapper that puts it into each router call.

A `Plan` is the routes of one `replay` block, a `Recording` collects the choices of one `record` block. A
`State` belongs to one RouterReplay and says which of them are in force. A `Site` sits on each router; the
router's `forward` is a method bound to the router itself, so a deepcopy of the model gets its own wrapper
and, by `Site.__deepcopy__`, no state: it routes live until it has a RouterReplay of its own.

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from router_replay.errors import ReplayError
from router_replay.replay.discover import FoundRouter
from router_replay.replay.families import Choice
from router_replay.replay.special import ALL_SELECTIONS
from router_replay.spec import RouterSpec

ATTRIBUTE = "_router_replay"
CANNOT_PROVE = (
    "a checkpointed layer is recomputed in backward, and the routes of its forward are not in force: its replay "
    "block is closed, and the checkpoint does not remember them. Call backward inside the block, or use "
    "model.gradient_checkpointing_enable() with use_reentrant=False, or pass context_fn=replayer.checkpoint_context "
    "to torch.utils.checkpoint.checkpoint"
)


@dataclasses.dataclass(eq=False)
class Plan:
    """The routes of one replay block, on the model's device in their narrow dtype.

    `live_T1` is True where a row is missing, None where every row is there: whether a layer needs its live
    choice is decided here, once, and not by looking at the device in each layer.
    """

    ids_TLK: Tensor
    live_T1: Tensor | None
    spec: RouterSpec
    rows_replayed: int | Tensor  # per pass; a tensor where only the device knows
    rows_live: int | Tensor
    from_host: bool = False  # came as numpy, so it goes where the pass is (offloaded parameters do not say where)
    agree_L: Tensor | None = None  # captured rows whose set equals the live choice, summed over passes; None: not asked
    passes: int = 0
    compiled_passes: Tensor | None = None  # counted on the device: a number would be burnt into the graph

    def __len__(self) -> int:
        return self.ids_TLK.shape[0]

    def move(self, device: torch.device) -> None:
        self.ids_TLK = self.ids_TLK.to(device)
        self.live_T1 = None if self.live_T1 is None else self.live_T1.to(device)
        self.agree_L = None if self.agree_L is None else self.agree_L.to(device)
        self.compiled_passes = None if self.compiled_passes is None else self.compiled_passes.to(device)

    def column(self, index: int) -> Tensor:
        """The ids of one routed layer, widened here and nowhere else: [T, K] int64."""
        return self.ids_TLK[:, index].long()


class Recording:
    """The choices of the passes in a record block, as narrow ids, a list of pieces per routed layer."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self.dtype = torch.uint8 if spec.num_experts <= 256 else torch.uint16
        self.pieces: list[list[Tensor]] = [[] for _ in spec.layers]

    def add(self, column: int, chosen_TK: Tensor) -> None:
        self.pieces[column].append(chosen_TK.detach().to(self.dtype))


class State:
    """What is in force. One per RouterReplay; kept on the object, since backward may run in another thread."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.recording: Recording | None = None
        self.owner: int | None = None  # the thread whose block is open
        self.recomputing: dict[int, Plan | None] = {}  # thread -> what its checkpoint remembers of its forward

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return State()


@dataclasses.dataclass(eq=False)
class Site:
    """The wrapper's memory on one router. `state` is None on a copy of a model, until it is given its own."""

    router: FoundRouter | None
    column: int
    state: State | None
    previous: Any = None  # a forward that somebody set on the instance before us
    used: bool = False  # the choice was answered (or noted) in the pass that runs now
    last: weakref.ref[Plan] | None = None  # what the last pass used: all we know where a checkpoint remembers nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return Site(None, self.column, None, copy.deepcopy(self.previous, memo))

    def plan_now(self) -> Plan | None:
        """The routes for this call: those of the block, or in a recompute those of its own forward."""
        state = self.state
        assert state is not None
        if torch.compiler.is_compiling():
            return state.plan
        if not in_backward():
            self.last = None if state.plan is None else weakref.ref(state.plan)
            return state.plan
        thread = threading.get_ident()
        if thread in state.recomputing:
            return state.recomputing[thread]
        was_live = self.last is None
        if was_live != (state.plan is None) or (self.last is not None and self.last() is not state.plan):
            raise ReplayError(CANNOT_PROVE)
        return state.plan


def in_backward() -> bool:
    """Is this call a recompute? A forward inside backward is one."""
    return torch._C._current_graph_task_id() != -1


def install(router: FoundRouter, column: int, state: State) -> None:
    """Put a Site and the wrapper on a router, or give the Site that a deepcopy left there its new state."""
    module = router.module
    site = module.__dict__.get(ATTRIBUTE)
    if site is not None and site.state is not None:
        raise ReplayError(
            f"{router.name} already belongs to a RouterReplay: use that one, or call its detach() before making another"
        )
    if site is not None:
        site.router, site.column, site.state = router, column, state
        return
    previous = module.__dict__.get(router.method)
    setattr(module, ATTRIBUTE, Site(router, column, state, previous))
    wrapper = _forward if router.method == "forward" else _route_tokens_to_experts
    setattr(module, router.method, types.MethodType(wrapper, module))


def uninstall(router: FoundRouter) -> None:
    """Leave the router as it was found."""
    module = router.module
    site = module.__dict__.pop(ATTRIBUTE, None)
    if site is None:
        return
    module.__dict__.pop(router.method, None)
    if site.previous is not None:
        setattr(module, router.method, site.previous)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _call(self, type(self).forward, args, kwargs)


def _route_tokens_to_experts(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _call(self, type(self).route_tokens_to_experts, args, kwargs)


def _original(site: Site, function: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return function(module, *args, **kwargs) if site.previous is None else site.previous(*args, **kwargs)


def _call(module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
    site: Site = module.__dict__[ATTRIBUTE]
    if site.state is None:
        return _original(site, function, module, args, kwargs)
    plan = site.plan_now()
    recording = site.state.recording
    first_time = torch.compiler.is_compiling() or not in_backward()  # a recompute is neither recorded nor counted
    if plan is None and (recording is None or not first_time):
        return _original(site, function, module, args, kwargs)
    router = site.router
    assert router is not None
    ids_TK = None if plan is None else plan.column(site.column)
    live_T1 = None if plan is None else plan.live_T1
    compare = first_time and plan is not None and plan.agree_L is not None
    live_TK = None
    if compare and router.choice is Choice.GROUPED:
        live_TK = _live_choice(site, router, function, module, args, kwargs)
    selection = ALL_SELECTIONS[router.choice](router, ids_TK, live_T1, compare and live_TK is None)
    with selection:
        out = _original(site, function, module, args, kwargs)
    if selection.chosen is None:
        if not first_time:
            raise ReplayError(f"layer {router.layer} chose no experts in a recompute: its routes were not used")
    elif first_time:  # a pass that leaves `used` unset ends with an error that names the layer
        site.used = True
        if recording is not None:
            recording.add(site.column, selection.chosen)
        if compare:
            _count_agreement(plan, site.column, ids_TK, selection.live_choice if live_TK is None else live_TK)
    return out


def _live_choice(site: Site, router: FoundRouter, function: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the router once more, live: grouped routers draw no numbers and change nothing in place."""
    selection = ALL_SELECTIONS[router.choice](router, None, None, False)
    with torch.no_grad(), selection:
        _original(site, function, module, args, kwargs)
    return selection.chosen


def _count_agreement(plan: Plan | None, column: int, ids_TK: Tensor | None, live_TK: Tensor | None) -> None:
    """Add to the layer's count on the device; nothing is read back until somebody asks for the stats."""
    assert plan is not None
    assert plan.agree_L is not None
    assert ids_TK is not None
    assert live_TK is not None
    same_T = (ids_TK.unsqueeze(-1) == live_TK.unsqueeze(-2)).any(-1).all(-1)
    if plan.live_T1 is not None:
        same_T = same_T & ~plan.live_T1.reshape(-1)
    plan.agree_L[column] += same_T.sum()
