"""Gradient checkpointing: a layer that is computed again in backward uses the routes of its own forward.

transformers keeps the checkpoint function on each layer that has it. It is wrapped so that, in the forward
pass, it takes what is in force then as its `context_fn`, and puts it into force again for the recompute. The
`with` block may be closed by then, or another one open. Reentrant checkpoints take no `context_fn`: the function
they call again notes what was in force, and a recompute under anything else raises.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from router_replay.errors import ReplayError
from router_replay.replay.state import CANNOT_PROVE, Plan, State, in_backward

FUNCTION = "_gradient_checkpointing_func"
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def contexts(state: State) -> Contexts:
    """What `context_fn` must return: nothing for the forward, this forward's routes for its recompute."""
    return contextlib.nullcontext(), _recompute(state, state.plan)


@contextlib.contextmanager
def _recompute(state: State, plan: Plan | None) -> Iterator[None]:
    thread = threading.get_ident()
    outer = state.recomputing.get(thread), thread in state.recomputing
    state.recomputing[thread] = plan
    try:
        yield
    finally:
        if outer[1]:
            state.recomputing[thread] = outer[0]
        else:
            del state.recomputing[thread]


class Remembering:
    """A layer's checkpoint function that also remembers the routes in force. A deepcopy is the plain function."""

    def __init__(self, inner: functools.partial[Any], state: State) -> None:
        self.inner = inner
        self.state = state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler plans its own recompute, from the graph of this forward
            return self.inner(function, *args, **kwargs)
        if self.inner.keywords["use_reentrant"]:
            return self.inner(functools.partial(_guarded, self.state, self.state.plan, function), *args, **kwargs)
        users = kwargs.pop("context_fn", None) or self.inner.keywords.get("context_fn")
        context_fn = functools.partial(_both, users, self.state)
        return self.inner(function, *args, context_fn=context_fn, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


def _guarded(state: State, plan: Plan | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A reentrant checkpoint calls this in forward and in recompute; both must be under the same routes."""
    if in_backward() and state.plan is not plan:
        raise ReplayError(CANNOT_PROVE)
    return function(*args, **kwargs)


def _both(users: Callable[[], Contexts] | None, state: State) -> Contexts:
    forward, recompute = contexts(state)
    if users is None:
        return forward, recompute
    users_forward, users_recompute = users()
    return users_forward, _nested(users_recompute, recompute)


@contextlib.contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def remember(layers: list[nn.Module], state: State) -> None:
    """Wrap the checkpoint function of each layer that has one now. Cheap to call again."""
    for layer in layers:
        function = layer.__dict__.get(FUNCTION)
        if isinstance(function, functools.partial) and "use_reentrant" in function.keywords:
            setattr(layer, FUNCTION, Remembering(function, state))


def forget(layers: list[nn.Module]) -> None:
    for layer in layers:
        function = layer.__dict__.get(FUNCTION)
        if isinstance(function, Remembering):
            setattr(layer, FUNCTION, function.inner)
