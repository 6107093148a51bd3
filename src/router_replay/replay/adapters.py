"""Adapters says whether a pass runs with the adapters of the policy, or with others: then it is the reference's pass.

PEFT has no public way to ask one layer, but every layer of it has the two attributes that are read here, and PEFT
switches all layers together. transformers' own `disable_adapters` sets the same ones.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Adapters:
    """Remembers which adapters of `model` are active now; a model without adapters has none."""

    def __init__(self, model: nn.Module) -> None:
        layers = (module for module in model.modules() if _is_tuner(module))
        self._layer: Any = next(layers, None)
        self._before = self._active()

    def changed(self) -> bool:
        """Return whether other adapters are active than before, or the adapters are disabled."""
        return self._layer is not None and self._active() != self._before

    def _active(self) -> tuple[str, ...]:
        if self._layer is None or self._layer.disable_adapters:
            return ()
        return tuple(self._layer.active_adapters)


def _is_tuner(module: nn.Module) -> bool:
    return isinstance(getattr(module, "disable_adapters", None), bool) and hasattr(module, "active_adapters")
