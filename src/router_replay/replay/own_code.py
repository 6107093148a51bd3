"""Run a router's own code with another `torch.topk`.

A TorchFunctionMode sees every operation of a router, and each of them then takes some microseconds more. Most routers
choose by one `torch.topk` in the code of their own method, and for them another `topk` is enough: a copy of the method
runs, whose global name `torch` stands for an object that has this `topk` and is torch in all else. The copy lives for
one call, so that it sees the globals as they are, and nothing outside of the call changes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


class TorchWith:
    """Stands for the module torch, with another `topk`."""

    __slots__ = ("topk",)

    def __init__(self, topk: Callable[..., Any]) -> None:
        self.topk = topk

    def __getattr__(self, name: str) -> Any:  # called for what is not found here: all but `topk`
        return getattr(torch, name)


def with_topk(function: types.FunctionType, topk: Callable[..., Any]) -> types.FunctionType:
    """Return `function`, whose code calls `torch.topk`, as it is with `topk` in its place."""
    names = {**function.__globals__, "torch": TorchWith(topk)}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def calls_topk(function: Any, code: types.CodeType | None) -> bool:
    """Return whether `code`, which called `torch.topk`, is that of `function`, so that `with_topk` can answer it."""
    return (
        isinstance(function, types.FunctionType)
        and function.__code__ is code
        and "torch" in code.co_names
        and "topk" in code.co_names
        and function.__globals__.get("torch") is torch
    )
