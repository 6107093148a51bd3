"""Every public name says what it does and what its arguments mean."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

# The packages whose `__all__` users import from, and the modules that docs/api shows besides.
PUBLIC = (
    *("router_replay", "router_replay.batch", "router_replay.engines", "router_replay.families"),
    *("router_replay.forward", "router_replay.measure", "router_replay.replay", "router_replay.report"),
    *("router_replay.replay.megatron", "router_replay.gateway"),
    *("router_replay.stitch", "router_replay.store", "router_replay.wire", "router_replay.recording"),
)
SHOWN = (
    *("router_replay.engines.prefill_decode", "router_replay.engines.vllm.weights", "router_replay.errors"),
    *("router_replay.replay.megatron.recorded", "router_replay.batch.megatron"),
    *("router_replay.replay.follow", "router_replay.store.types"),
    *("router_replay.replay.replayer", "router_replay.replay.stats", "router_replay.rl.environments.base"),
    *("router_replay.rl.policy.losses", "router_replay.verify.run", "router_replay.verify.verdict"),
)


def exported(module: str) -> list[tuple[str, Any]]:
    home = importlib.import_module(module)
    own = [name for name, value in vars(home).items() if getattr(value, "__module__", "") == module]
    names = home.__all__ if module in PUBLIC else [name for name in own if not name.startswith("_")]
    return [(f"{module}.{name}", getattr(home, name)) for name in names]


def unexplained(name: str, value: Any) -> Iterator[str]:
    """Yield what the docstrings of a function, or of a class and its methods, do not explain."""
    if inspect.isclass(value):
        if issubclass(value, Exception):
            return
        text = f"{value.__doc__ or ''}\n{value.__init__.__doc__ or ''}"
        yield from unnamed(name, text, fields(value) if dataclasses.is_dataclass(value) else arguments(value.__init__))
        for method, member in vars(value).items():
            if not method.startswith("_") and callable(inspect.unwrap(getattr(member, "__func__", member))):
                function = getattr(value, method)
                yield from unnamed(f"{name}.{method}", inspect.getdoc(function) or "", arguments(function))
            elif not method.startswith("_") and isinstance(member, property) and not inspect.getdoc(member):
                yield f"{name}.{method} has no docstring"
    elif inspect.isfunction(value):
        yield from unnamed(name, value.__doc__ or "", arguments(value))


def unnamed(name: str, text: str, wanted: list[str]) -> Iterator[str]:
    if not text.strip():
        yield f"{name} has no docstring"
    elif lost := [argument for argument in wanted if not re.search(rf"\b{re.escape(argument)}\b", text)]:
        yield f"the docstring of {name} does not name {', '.join(lost)}"


def fields(value: Any) -> list[str]:
    """List the fields of a dataclass that no comment beside them explains."""
    commented = set(re.findall(r"^    (\w+): .*#", inspect.getsource(value), re.MULTILINE))
    found = [field.name for field in dataclasses.fields(value) if field.init]
    return [name for name in found if name not in commented and not name.startswith("_")]


def arguments(function: Any) -> list[str]:
    """List the named parameters of a function; those of protocols and enums come from their base and say nothing."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [
        one.name for one in found if one.name not in ("self", "cls") and one.name[0] != "_" and one.kind not in kinds
    ]


@pytest.mark.parametrize("module", PUBLIC + SHOWN)
def test_every_public_name_explains_its_arguments(module: str) -> None:
    found = [line for name, value in exported(module) for line in unexplained(name, value)]
    assert not found, "\n".join(found)
