"""Old module paths of this package. They keep working for one release, with a DeprecationWarning.

The table lists all of them. `install` adds one import finder, which returns the module at the new path when the old
path is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

_ENGINES = "router_replay.engines"
MODULES = {
    f"{_ENGINES}.{old}": f"{_ENGINES}.{new}"
    for old, new in {
        "vllm_inprocess": "vllm.inprocess",
        "vllm_http": "vllm.http",
        "vllm_client": "vllm.client",
        "vllm_samples": "vllm.samples",
        "vllm_weights": "vllm.weights",
        "vllm_serve": "vllm.serve",
        "vllm_guard": "vllm.guard",
        "vllm_plugin": "vllm.plugin",
        "vllm_plugin.worker": "vllm.plugin.worker",
        "vllm_plugin.forcing": "vllm.plugin.routes.forcing",
        "vllm_plugin.rules": "vllm.plugin.routes.rules",
        "vllm_plugin.frontend": "vllm.plugin.routes.frontend",
        "vllm_plugin.delivery": "vllm.plugin.routes.delivery",
        "vllm_plugin.weights": "vllm.plugin.weights.loader",
        "vllm_plugin.fitting": "vllm.plugin.weights.fitting",
        "vllm_plugin.sources": "vllm.plugin.weights.sources",
        "vllm_plugin.transfer": "vllm.plugin.weights.transfer",
        "vllm_plugin.seeds": "vllm.plugin.repairs.seeds",
        "vllm_plugin.signals": "vllm.plugin.repairs.signals",
        "on_loop": "remote",
        "http_engine": "remote",
        "sglang_answers": "sglang.answers",
        "embedded_cache": "embedded.cache",
        "embedded_runner": "embedded.runner",
        "embedded_samples": "embedded.samples",
        "embedded_sampling": "embedded.sampling",
        "embedded_schedule": "embedded.schedule",
        "embedded_weights": "embedded.weights",
    }.items()
}
# Names that moved out of a module that still exists. The `__getattr__` of that module calls `moved_name`.
NAMES = {
    (f"{_ENGINES}.prefill_decode", name): f"{_ENGINES}.stale" for name in ("Role", "check_server", "stale_reasons")
}
# An older installation registers this path as vLLM's entry point; its user could not act on a warning.
QUIET = {f"{_ENGINES}.vllm_plugin"}


class _Loader(importlib.abc.Loader):
    def exec_module(self, module: types.ModuleType) -> None:
        old = module.__name__
        new = MODULES[old]
        if old not in QUIET:
            warnings.warn(
                f"{old} has moved to {new}: import {new}; the next release removes the old path", DeprecationWarning, 2
            )
        sys.modules[old] = importlib.import_module(new)  # the import system then returns this one


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, _Loader()) if fullname in MODULES else None


def install() -> None:
    """Make the old paths work in this process; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Before other finders: they would load a second copy of a module through the __path__ of a moved package.
        sys.meta_path.insert(0, _Finder())


def moved_name(module: str, name: str) -> object:
    """Return the value of a name that moved out of `module`; the `__getattr__` of that module calls this.

    Raises AttributeError for any other name.
    """
    new = NAMES.get((module, name))
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} has moved to {new}: import it from there; the next release removes the old path",
        DeprecationWarning,
        3,
    )
    return getattr(importlib.import_module(new), name)
