"""install() gives code that was written for Megatron's own RouterReplay the rules of this package.

    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    installation = install()                            # once per process, before the model is built
    RouterReplay.set_replay_data(rows_of_each_layer)    # from here on, the caller's code as it is
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

The methods of Megatron's class are replaced, not the class: code that imported it earlier is reached too. What
install keeps lies in the Installation and not in Megatron's objects, so `uninstall` leaves nothing behind.

Shapes: T tokens of this rank, K top-k, E experts.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from router_replay.errors import ReplayError
from router_replay.replay.checkpoint_calls import surrounding_checkpoints
from router_replay.replay.megatron.native_rows import MISSING, NativeSite, missing_rows, narrow, refuse_form
from router_replay.replay.megatron.routers import TESTED, refuse_settings
from router_replay.replay.megatron.site import Choice
from router_replay.replay.state import in_backward
from router_replay.replay.stats import Stats

ACTIONS = ("RECORD", "REPLAY_FORWARD", "REPLAY_BACKWARD")
API = {  # what is replaced or called, with its arguments
    "set_replay_data": ("all_layers_topk_indices",),
    "set_target_indices": ("self", "topk_indices"),
    "set_router_replay_action": ("self", "router_replay_action"),
    "clear_indices": ("self",),
    "record_indices": ("self", "topk_indices"),
    "get_replay_topk": ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
}
_LIVE = object()  # what a checkpoint's forward used, if it routed live


def install(model_chunks: nn.Module | Sequence[nn.Module] = ()) -> Installation:
    """Make Megatron's RouterReplay check its rows, and recompute each layer with the experts of its own forward.

    `model_chunks` are models that were built before this call; models that are built later are found by themselves.
    For a router that is not found, the range of the ids is checked in its first forward pass.

    Returns an Installation, which is a context manager and has `uninstall`. A second call returns the same one, and
    each call needs its own `uninstall`. Raises ReplayError if megatron-core is missing, if its RouterReplay has another
    interface than that of the tested version, or if `model_chunks` have no RouterReplay.
    """
    replayed, router = _megatron_classes()
    current = _Patched.installation
    if current is None:
        current = Installation(replayed, router)
        current.patch()
        _Patched.installation = current
    current.depth += 1
    try:
        current.add(model_chunks)
    except ReplayError:
        current.uninstall()
        raise
    return current


class _Patched:
    installation: Installation | None = None  # Megatron has one class per process, and so there is one of these


class Installation:
    """Holds the replaced methods of Megatron's RouterReplay until `uninstall`. `install` makes it."""

    def __init__(self, replayed: type, router: type) -> None:
        self._class = replayed
        self._router = router
        self._originals = {name: replayed.__dict__[name] for name in API}
        self._router_init = router.__dict__["__init__"]
        self._sites: weakref.WeakKeyDictionary[Any, NativeSite] = weakref.WeakKeyDictionary()
        self.depth = 0  # calls of install without their uninstall

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._refuse_waiting()
        finally:
            self._remove()

    def uninstall(self) -> None:
        """Restore Megatron's methods, unless another call of `install` still needs these.

        Raises ReplayError if a replayed checkpointed forward still awaits its backward.
        """
        self._refuse_waiting()
        self._remove()

    @property
    def stats(self) -> Stats:
        """The rows replayed and routed live so far in the routers of Megatron's list, one entry per router.

        `layers` has the ids of their decoder layers; for a router that is not found, its position in the list.
        """
        natives = list(self._class.global_router_replay_instances)  # type: ignore[attr-defined]
        sites = [self._site(native) for native in natives]
        return Stats(
            layers=tuple(number if site.layer is None else site.layer for number, site in enumerate(sites)),
            passes=max((site.passes for site in sites), default=0),
            rows_replayed=tuple(site.rows_replayed for site in sites),
            rows_live=tuple(site.rows_live for site in sites),
            agreement=None,
        )

    def add(self, model_chunks: nn.Module | Sequence[nn.Module]) -> None:
        """Find the routers of `model_chunks`, a model or a list of them, so that their rows are checked when given."""
        models = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        routers: list[Any] = [
            module for model in models for module in model.modules() if isinstance(module, self._router)
        ]
        if routers and all(router.router_replay is None for router in routers):
            raise ReplayError(
                "the routers of this model have no RouterReplay of Megatron, so code that uses it would do nothing: "
                "set moe_enable_routing_replay=True in the TransformerConfig before the model is built"
            )
        for router in routers:
            self._bind(router)

    def patch(self) -> None:
        """Replace the methods of Megatron's classes."""
        cls, own = self._class, self

        def set_replay_data(all_layers_topk_indices: Sequence[Tensor]) -> None:
            own.set_all(all_layers_topk_indices)

        def set_target_indices(self: Any, topk_indices: Tensor) -> None:
            own.set_rows([self], [topk_indices])

        def set_router_replay_action(self: Any, router_replay_action: Any) -> None:
            own.set_action(self, router_replay_action)

        def clear_indices(self: Any) -> None:
            own.clear(self)

        def get_replay_topk(
            self: Any,
            scores: Tensor,
            topk: int,
            num_groups: int | None = None,
            group_topk: int | None = None,
            default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
        ) -> tuple[Tensor, Tensor]:
            return own.choose(self, scores, topk, num_groups, group_topk, default_compute_topk)

        for method in (set_target_indices, set_router_replay_action, clear_indices, get_replay_topk):
            setattr(cls, method.__name__, method)
        cls.set_replay_data = staticmethod(set_replay_data)  # type: ignore[attr-defined]
        init = self._router_init

        @functools.wraps(init)
        def bound_init(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            own._bind(self)

        self._router.__init__ = bound_init  # type: ignore[misc]

    # -- what Megatron's methods do while this is installed -----------------------------------------

    def set_all(self, all_rows: Sequence[Tensor]) -> None:
        """Give each router of Megatron's list its rows of the next forward pass: all of `all_rows`, or none."""
        natives = list(self._class.global_router_replay_instances)  # type: ignore[attr-defined]
        if len(all_rows) != len(natives):
            raise ReplayError(
                f"expected the rows of {len(natives)} routers (RouterReplay.global_router_replay_instances), got "
                f"{len(all_rows)}: give one tensor per router, in the order in which they were built"
            )
        self.set_rows(natives, all_rows)

    def set_rows(self, natives: Sequence[Any], all_rows: Sequence[Tensor]) -> None:
        """Check `all_rows`, and keep them as the rows of the next forward pass of `natives`.

        The rows of all routers are checked together, so that this waits for the device once.
        """
        sites = [self._site(native) for native in natives]
        names = [self._name(native) for native in natives]
        for site, name, rows in zip(sites, names, all_rows, strict=True):
            self._refuse_bypass(site)
            refuse_form(rows, site, name)
        lengths = {len(rows) for rows in all_rows}
        if len(lengths) > 1:
            raise ReplayError(f"the rows of all routers must be of one micro-batch, got {sorted(lengths)} rows")
        missing = missing_rows(sites, names, all_rows)
        for native, site, rows, count in zip(natives, sites, all_rows, missing, strict=True):
            site.ids_TK, site.missing = rows, count if site.experts else None
            native.target_topk_idx = rows

    def set_action(self, native: Any, action: Any) -> None:
        """Set the action of a router. A replay with settings that bypass it is refused."""
        if action is not None and action.name != "RECORD":
            self._refuse_bypass(self._site(native))
        native.router_replay_action = action

    def clear(self, native: Any) -> None:
        """Drop the rows and the recording of a router. Checkpoints that await their backward keep their own rows."""
        self._originals["clear_indices"](native)
        self._site(native).ids_TK = None

    def choose(
        self,
        native: Any,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the chosen experts, as get_replay_topk does.

        The action decides in a forward pass only. In a recompute the checkpoint decides: it uses the experts of its
        own forward, whatever the action is by then.
        """
        site = self._site(native)
        entered, recomputed = surrounding_checkpoints()
        backward = recomputed is not None or in_backward()
        if backward:
            used, live_T1 = self._of_the_forward(native, site, recomputed), None
        else:
            used, live_T1 = self._rows_of_this_pass(native, site, scores, topk)
        choice = Choice(None if used is _LIVE else used.to(scores.device).long(), live_T1, False)
        out = choice.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if not backward and used is _LIVE and _named(native, "RECORD"):
            native.record_indices(out[1])
        if entered and used is not _LIVE:  # a copy: the caller may fill its tensor with the rows of another micro-batch
            used = narrow(out[1], scores.shape[1])
        for checkpoint in entered:
            site.used[checkpoint] = used
            if used is not _LIVE:
                site.waiting.add(checkpoint)
        return out

    # -- private ----------------------------------------------------------------------------------

    def _rows_of_this_pass(self, native: Any, site: NativeSite, scores: Tensor, topk: int) -> tuple[Any, Tensor | None]:
        """Return the ids for a forward pass and the mask of missing rows, or _LIVE and None."""
        if native.router_replay_action is None or _named(native, "RECORD"):
            return _LIVE, None
        name, ids_TK = self._name(native), site.ids_TK
        if ids_TK is None:
            raise ReplayError(
                f"{name}: a forward pass runs with {native.router_replay_action.name}, and there are no rows for it: "
                "give each micro-batch its rows (set_replay_data or set_target_indices) before its forward pass, and "
                "clear the action of routers that route live"
            )
        tokens, experts = scores.shape
        if site.missing is None:  # this router was not found: its numbers are known only now
            site.top_k, site.experts = topk, experts
            refuse_form(ids_TK, site, name)
            (site.missing,) = missing_rows([site], [name], [ids_TK])
        if len(ids_TK) != tokens:
            raise ReplayError(
                f"{name}: the router got {tokens} tokens, and the rows are those of {len(ids_TK)}: give the rows of "
                "this micro-batch and this rank, in the order of its hidden states [s, b], padding included"
            )
        site.ids_TK = None
        site.passes += 1
        site.rows_replayed += tokens - site.missing
        site.rows_live += site.missing
        ids_TK = ids_TK.to(scores.device)
        if not site.missing:
            return ids_TK, None
        live_T1 = ids_TK[:, :1] == MISSING
        return torch.where(live_T1, 0, ids_TK), live_T1

    def _of_the_forward(self, native: Any, site: NativeSite, checkpoint: Any) -> Any:
        if checkpoint is not None and checkpoint in site.used:
            site.waiting.discard(checkpoint)
            return site.used[checkpoint]
        if native.router_replay_action is None and not site.passes:
            return _LIVE  # its forward ran before install
        raise ReplayError(
            f"{self._name(native)}: a layer is recomputed in backward, and it is not known which rows its forward "
            "used: use Megatron's checkpoints (recompute_granularity) or torch.utils.checkpoint, and call install() "
            "before the forward pass"
        )

    def _bind(self, router: Any) -> None:
        if router.router_replay is not None:
            self._site(router.router_replay).bind(router)

    def _refuse_bypass(self, site: NativeSite) -> None:
        if site.router is not None:
            refuse_settings(site.router.config)

    def _site(self, native: Any) -> NativeSite:
        site = self._sites.get(native)
        if site is None:
            site = self._sites[native] = NativeSite()
        return site

    def _name(self, native: Any) -> str:
        site, natives = self._site(native), self._class.global_router_replay_instances  # type: ignore[attr-defined]
        if site.layer is not None:
            return f"layer {site.layer}"
        return f"router {natives.index(native)}" if native in natives else "a router outside of Megatron's list"

    def _refuse_waiting(self) -> None:
        if self.depth <= 1 and any(site.waiting for site in self._sites.values()):
            raise ReplayError(
                "uninstall() was called before the backward pass of a replayed forward with checkpoints, which would "
                "be recomputed by Megatron's queue. First run the backward pass, or delete the loss and the outputs"
            )

    def _remove(self) -> None:
        if self.depth == 0:
            return
        self.depth -= 1
        if self.depth:
            return
        for name, original in self._originals.items():
            setattr(self._class, name, original)
        self._router.__init__ = self._router_init  # type: ignore[misc]
        _Patched.installation = None


def _megatron_classes() -> tuple[Any, Any]:
    """Return Megatron's RouterReplay and TopKRouter; refuse a version whose interface is another one."""
    try:
        import megatron.core
        from megatron.core.transformer.moe import router_replay
        from megatron.core.transformer.moe.router import TopKRouter
    except ImportError as error:
        raise ReplayError(
            f'install() needs megatron-core with RouterReplay: pip install "megatron-core=={TESTED}" (the version that '
            "was tested)"
        ) from error
    cls = router_replay.RouterReplay
    version = f"megatron-core {megatron.core.__version__}"
    otherwise = f"use MegatronReplay, which does not need it, or megatron-core {TESTED}"
    actions = tuple(action.name for action in router_replay.RouterReplayAction)
    if actions != ACTIONS:
        raise ReplayError(
            f"{version}: RouterReplayAction has the members {actions}, expected {ACTIONS}, and install() would not "
            f"know what the others mean: {otherwise}"
        )
    installed = _Patched.installation is not None
    for name, expected in API.items():
        method = getattr(cls, name, None)
        got = None if method is None else tuple(inspect.signature(method).parameters)
        if got != expected or (not installed and name not in cls.__dict__):
            raise ReplayError(
                f"{version}: RouterReplay.{name} takes {'nothing: it is missing' if got is None else got}, expected "
                f"{expected}: {otherwise}"
            )
    return cls, TopKRouter


def _named(native: Any, action: str) -> bool:
    return native.router_replay_action is not None and native.router_replay_action.name == action
