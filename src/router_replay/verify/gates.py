"""Keep the gate weights of a pass, and give them to another pass over the same tokens with the same experts.

outputs = RouterOutputs(replayer)
with outputs.kept():          # a pass in float32
    model(...)
with outputs.given():         # the same tokens in bfloat16, with the gate weights of float32
    model(...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from router_replay.families import Choice
from router_replay.families.from_modules import FoundRouter


class RouterOutputs:
    """Holds what each of the `routers` returned in each pass: gate weights, and ids that are equal in both passes."""

    def __init__(self, routers: tuple[FoundRouter, ...]) -> None:
        self._routers = routers
        self._outputs: dict[str, list[Any]] = {router.name: [] for router in routers}

    @staticmethod
    def why_not(routers: tuple[FoundRouter, ...]) -> str:
        """Return why the gate weights of these `routers` cannot be kept; empty if they can."""
        if any(router.choice is Choice.PRODUCT_KEYS for router in routers):
            return "one module holds the router and the experts of a layer, so its gate weights cannot be exchanged"
        return ""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what the routers return in the passes of this block, in order."""

        def keep(name: str, output: Any) -> Any:
            self._outputs[name].append(_each(output, Tensor.detach))
            return output

        with self._returning(keep):
            yield

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Let the routers return what was kept, pass by pass, in the number type of the pass; each can be used once."""
        turns = {name: iter(outputs) for name, outputs in self._outputs.items()}

        def give(name: str, output: Any) -> Any:
            return tree_map(_like, next(turns[name]), output)

        with self._returning(give):
            yield

    @contextlib.contextmanager
    def _returning(self, change: Callable[[str, Any], Any]) -> Iterator[None]:
        """Pass the result of every router, which may be replayed, through `change`."""
        before = [router.module.__dict__[router.method] for router in self._routers]
        for router, method in zip(self._routers, before, strict=True):
            setattr(router.module, router.method, _changed(router.name, method, change))
        try:
            yield
        finally:
            for router, method in zip(self._routers, before, strict=True):
                setattr(router.module, router.method, method)


def _changed(name: str, method: Callable[..., Any], change: Callable[[str, Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(name, method(*args, **kwargs))


def _each(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(lambda one: change(one) if isinstance(one, Tensor) else one, output)


def _like(kept: Any, output: Any) -> Any:
    if isinstance(kept, Tensor) and isinstance(output, Tensor) and output.is_floating_point():
        return kept.to(output.dtype)
    return kept
