"""Hold float32 master weights beside the bfloat16 copies that one rank computes with.

The parameters of the model are the master weights: the optimizer, the checkpoints and the engine's weights use them.
During the passes the copies stand in their place. A weight is cast once after each change, not once per pass, and
nothing is sharded or gathered. Gradients are collected in float32 as soon as they are complete.

    weights = MasterWeights(model, torch.bfloat16)
    with weights.computing():
        loss(model(...)).backward()
    optimizer.step()                       # on model.parameters(), float32
    weights.changed()
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """A place of a parameter in the model. Tied weights have several places and one copy."""

    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter


class Weights:
    """Let a model compute with its own parameters: in float32, or where FSDP2 casts them."""

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which passes run."""
        return contextlib.nullcontext()

    def changed(self) -> None:
        """Take note that the parameters have new values."""


class MasterWeights(Weights):
    """Keep copies in `dtype` of the float32 parameters of `model`. Parameters of the modules in `kept` get no copy."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, kept: tuple[nn.Module, ...] = ()) -> None:
        stay = {id(parameter) for module in kept for parameter in module.parameters()}
        copies: dict[int, nn.Parameter] = {}
        self._places: list[_Place] = []
        for module in model.modules():
            for name, master in module.named_parameters(recurse=False):
                if id(master) in stay or not master.is_floating_point() or master.dtype == dtype:
                    continue
                if id(master) not in copies:
                    copies[id(master)] = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
                    copies[id(master)].register_post_accumulate_grad_hook(_collector(master))
                self._places.append(_Place(module, name, master, copies[id(master)]))
        unique = {id(place.master): place for place in self._places}.values()
        self._masters: list[Tensor] = [place.master.detach() for place in unique]
        self._copies: list[Tensor] = [place.copy.detach() for place in unique]
        self._stale = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Put the copies in place of the master weights; they are cast anew only after `changed`."""
        if self._stale:
            torch._foreach_copy_(self._copies, self._masters)
            self._stale = False
        for place in self._places:
            place.module._parameters[place.name] = place.copy
        try:
            yield
        finally:
            for place in self._places:
                place.module._parameters[place.name] = place.master

    def changed(self) -> None:
        """Let the next block cast the weights anew. torch does not count the changes that a fused optimizer makes."""
        self._stale = True


def _collector(master: nn.Parameter) -> Callable[[Any], None]:
    def collect(copy: Any) -> None:
        if master.grad is None:
            master.grad = copy.grad.float()
        else:
            master.grad.add_(copy.grad)  # several micro-batches are added in float32
        copy.grad = None

    return collect
