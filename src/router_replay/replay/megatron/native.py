"""install() gives code that was written for Megatron's own RouterReplay the rules of this package.

    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    installation = install()                            # once per process, before the model is built
    RouterReplay.set_replay_data(rows_of_each_layer)    # from here on, the caller's code as it is
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

The methods of Megatron's class are replaced, not the class: code that imported it earlier is reached too. Routers ask
the Installation for their experts, so a patch of `get_replay_topk` that other code makes later (NeMo RL does) changes
nothing. What install keeps lies in the Installation and not in Megatron's objects: `uninstall` leaves nothing behind.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from router_replay.errors import ReplayError
from router_replay.replay.megatron.native_rules import Answer, NativeRules
from router_replay.replay.megatron.routers import TESTED
from router_replay.replay.megatron.site import NO_CHANGE, count_without_padding, swapped
from router_replay.replay.stats import Stats

ACTIONS = ("RECORD", "REPLAY_FORWARD", "REPLAY_BACKWARD")
ROUTING = ("self", "logits", "padding_mask")
API = {  # what is replaced or called, with its arguments
    "set_replay_data": ("all_layers_topk_indices",),
    "set_target_indices": ("self", "topk_indices"),
    "set_router_replay_action": ("self", "router_replay_action"),
    "clear_indices": ("self",),
    "record_indices": ("self", "topk_indices"),
    "get_replay_topk": ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
}


def install(model_chunks: nn.Module | Sequence[nn.Module] = ()) -> Installation:
    """Make Megatron's RouterReplay check its rows, and recompute each layer with the experts of its own forward.

    `model_chunks` are models that were built before this call, so that the range of their ids is checked when they are
    given. Models that are built later are found by themselves, all others in their first forward pass.

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
        current._remove()
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
        self._router_originals = {name: router.__dict__[name] for name in ("__init__", "routing")}
        self._ours: dict[str, Any] = {}  # what takes the place of _originals
        self.rules = NativeRules(replayed)
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

        Raises ReplayError if a replayed checkpointed forward still awaits its backward, or if other code replaced one
        of the methods since.
        """
        self._refuse_waiting()
        self._refuse_covered()
        self._remove()

    @property
    def stats(self) -> Stats:
        """The rows replayed and routed live so far in the routers of Megatron's list, one entry per router.

        `layers` has the ids of their decoder layers; for a router that is not found, its position in the list.
        """
        sites = self.rules.sites
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
            self.rules.bind(router)

    def patch(self) -> None:
        """Replace the methods of Megatron's classes."""
        cls, rules, clear = self._class, self.rules, self._originals["clear_indices"]

        def set_replay_data(all_layers_topk_indices: Sequence[Tensor]) -> None:
            rules.set_all(all_layers_topk_indices)

        def set_target_indices(self: Any, topk_indices: Tensor) -> None:
            rules.set_rows([self], [topk_indices])

        def set_router_replay_action(self: Any, router_replay_action: Any) -> None:
            rules.set_action(self, router_replay_action)

        def clear_indices(self: Any) -> None:
            clear(self)
            rules.clear(self)

        def get_replay_topk(
            self: Any,
            scores: Tensor,
            topk: int,
            num_groups: int | None = None,
            group_topk: int | None = None,
            default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
        ) -> tuple[Tensor, Tensor]:
            return rules.choose(self, scores, topk, num_groups, group_topk, default_compute_topk)

        methods = (set_target_indices, set_router_replay_action, clear_indices, get_replay_topk)
        self._ours = {method.__name__: method for method in methods}
        self._ours["set_replay_data"] = staticmethod(set_replay_data)
        for name, method in self._ours.items():
            setattr(cls, name, method)
        self._patch_router()

    def _patch_router(self) -> None:
        """Let every router be found when it is built, and ask this object for its experts."""
        cls, rules = self._class, self.rules
        init, routing = self._router_originals.values()

        @functools.wraps(init)
        def bound_init(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            rules.bind(self)

        @functools.wraps(routing)
        def asking(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
            if not isinstance(self.router_replay, cls):  # none, or the Choice of a MegatronReplay
                return routing(self, logits, padding_mask=padding_mask)
            rules.bind(self)
            count = count_without_padding(self) if padding_mask is not None else NO_CHANGE
            with swapped(self, router_replay=Answer(rules, self.router_replay), _apply_expert_bias=count):
                return routing(self, logits, padding_mask=padding_mask)

        self._router.__init__ = bound_init  # type: ignore[misc]
        self._router.routing = asking  # type: ignore[attr-defined]

    # -- private ----------------------------------------------------------------------------------

    def _refuse_covered(self) -> None:
        covered = [name for name, ours in self._ours.items() if self._class.__dict__.get(name) is not ours]
        if self.depth == 1 and covered:
            raise ReplayError(
                f"RouterReplay.{covered[0]} was replaced by other code after install(): restore it before uninstall()"
            )

    def _refuse_waiting(self) -> None:
        if self.depth == 1 and self.rules.waiting:
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
        for name, original in self._router_originals.items():
            setattr(self._router, name, original)
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
    methods = [(cls, name, expected) for name, expected in API.items()] + [(TopKRouter, "routing", ROUTING)]
    for owner, name, expected in methods:
        method = owner.__dict__.get(name)
        got = None if method is None else tuple(inspect.signature(getattr(owner, name)).parameters)
        if got != expected:
            raise ReplayError(
                f"{version}: {owner.__name__}.{name} {'is missing' if got is None else f'takes {got}'}, expected "
                f"{expected}: {otherwise}"
            )
    return cls, TopKRouter
