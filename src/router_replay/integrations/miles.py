"""More model families for the routing replay of miles' FSDP backend. Not run: miles is not on PyPI.

    from router_replay.integrations import miles

    miles.register()     # in the process of the training actor, before it builds its model

miles has its own replay, with one adapter for each of a few model families. `register` adds an adapter for every
family of this package that chooses its experts by one topk over all of them. miles keeps the rows, the stages and the
checks; only where the choice is made comes from here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn, return_types
from torch.overrides import TorchFunctionMode

from router_replay.errors import ConfigError
from router_replay.families import FAMILIES, Choice, Family, by_model_type, measured
from router_replay.families.from_modules import sizes_of
from router_replay.replay.selection import TOP_K, is_choice

REGISTRY = "miles.backends.fsdp_utils.adaptations.routing_replay"
MANAGER = "miles.utils.replay_base"


def register() -> list[str]:
    """Register an adapter for each family in `supported`, behind those of miles; return their names."""
    try:
        registry, manager = importlib.import_module(REGISTRY), importlib.import_module(MANAGER).routing_replay_manager
        make, add = registry.RoutingReplayAdapter, registry.register_routing_replay_adapter
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this miles has no {REGISTRY} with register_routing_replay_adapter, as its main branch of November 2026 "
            f"has: {error}"
        ) from error
    families = supported()
    for family in families:
        add(
            make(
                name=f"router_replay.{family.name}",
                applies_to=functools.partial(is_of, family),
                module_cls_name=measured.FAMILIES[family.name].router,
                install=functools.partial(install, manager),
            )
        )
    return [family.name for family in families]


def supported() -> list[Family]:
    """Return the families with one router in each routed layer, whose forward makes one topk over all experts."""
    return [
        family
        for family in FAMILIES
        if family.name in measured.FAMILIES
        and measured.FAMILIES[family.name].choice is Choice.TOP_K
        and all(where.method == "forward" for where in family.where.values())
        and not family.ordered
        and (family.config is None or family.config.routers_per_layer == 1)
    ]


def is_of(family: Family, config: Any) -> bool:
    """Return whether `config`, of transformers, is that of a model of `family`."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return by_model_type(getattr(text, "model_type", None)) is family


def install(manager: Any, router: nn.Module) -> None:
    """Let `router` ask `manager`, miles' routing_replay_manager, for its experts."""
    forward: Callable[..., Any] = router.forward
    num_experts, top_k = sizes_of(type(router).__name__, router)

    def replayed(*arguments: Any, **named: Any) -> Any:
        with _Asking(manager, num_experts, top_k):
            return forward(*arguments, **named)

    router.forward = replayed


class _Asking(TorchFunctionMode):
    """Gives the topk of one call of a router to miles, which expects rows of tokens."""

    def __init__(self, manager: Any, num_experts: int, top_k: int) -> None:
        super().__init__()
        self._manager, self._num_experts, self._top_k = manager, num_experts, top_k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOP_K or not is_choice(args, kwargs, self._num_experts, self._top_k):
            return func(*args, **kwargs)
        scores: Tensor = args[0]

        def live(rows: Tensor, k: int) -> Any:
            return func(rows, *args[1:], **kwargs)

        choose = self._manager.get_topk_fn(live, return_probs=True)
        values, ids = choose(scores.reshape(-1, self._num_experts), self._top_k)
        shape = (*scores.shape[:-1], self._top_k)
        return return_types.topk((values.reshape(shape), ids.reshape(shape)))
