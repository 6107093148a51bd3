"""Make a checkpointed layer that is recomputed in backward use the routes of its own forward.

`checkpoint_calls` finds these routes for routers in eager mode. A compiled layer cannot inspect the call stack,
so the checkpoint functions that transformers and torch keep on modules are wrapped: the function that they checkpoint
remembers the routes of its first call, and makes them active when it is called again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from router_replay.replay.state import State

# The attributes in which a module keeps its checkpoint function: transformers' layers, and torch's checkpoint_wrapper.
ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def contexts(state: State) -> Contexts:
    """Return the pair of contexts for `context_fn`: none for the forward, the forward's routes for its recompute."""
    plan, _ = state.decide()
    return contextlib.nullcontext(), state.recompute(plan)


class Remembering:
    """Wraps a module's checkpoint function so that the recompute uses the routes of its forward.

    A deepcopy or a pickle of the module holds the plain function.
    """

    def __init__(self, inner: functools.partial[Any], state: State) -> None:
        self.inner = inner
        self.state = state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint `function`; its recompute will use the routes that are active now."""
        if torch.compiler.is_compiling():  # the compiler plans its own recompute, from the graph of this forward
            return self.inner(function, *args, **kwargs)
        return self.inner(CalledTwice(self.state, function), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.inner,)


class CalledTwice:
    """Wraps a checkpointed function and treats every call after the first as a recompute."""

    def __init__(self, state: State, function: Callable[..., Any]) -> None:
        self.state = state
        self.function = function
        self.plan, _ = state.decide()
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; from the second call on with the routes that were active when this object was made."""
        if not self.called:
            self.called = True
            return self.function(*args, **kwargs)
        with self.state.recompute(self.plan):
            return self.function(*args, **kwargs)


def remember(model: nn.Module, state: State) -> None:
    """Wrap every checkpoint function in the model that is not wrapped yet.

    This is called for each outermost block, since checkpointing may be enabled at any time.
    """
    for module in _modules(model):
        held = module.__dict__
        for attribute in ATTRIBUTES:
            if attribute in held and isinstance(held[attribute], functools.partial):
                setattr(module, attribute, Remembering(held[attribute], state))


def forget(model: nn.Module, state: State) -> None:
    """Undo `remember` for the checkpoint functions that belong to this state."""
    for module in _modules(model):
        for attribute in ATTRIBUTES:
            function = module.__dict__.get(attribute)
            if isinstance(function, Remembering) and function.state is state:
                setattr(module, attribute, function.inner)


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return what `model.modules()` yields, which takes several times as long: its generators are nested."""
    found, seen = [model], {model}
    for module in found:  # grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found
