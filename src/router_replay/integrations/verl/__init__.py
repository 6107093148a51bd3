"""R2 and R3 in verl's `fsdp` and `fsdp2` engines. Importing this module is all it takes.

verl imports it by the entry point `verl.plugins`, at the end of `import verl`, in every process, and logs a failure at
DEBUG only. `actor_rollout_ref.model.external_lib=router_replay.integrations.verl` imports it aloud.

verl's FSDP module is not imported here: that would fix verl's platform before other plugins could register one, and
cost seconds in processes that never train. The engine is registered as soon as verl itself has imported that module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

FSDP = "verl.workers.engine.fsdp.transformer_impl"


def _register(fsdp: ModuleType) -> None:
    """Give verl the engine of this package, or, in a version that nobody tried, only the refusal."""
    from router_replay.integrations.verl import support

    support.guard(fsdp.FSDPEngine)
    if support.wrong_version() is None:
        from router_replay.integrations.verl import engine

        engine.register()


class _Once(importlib.abc.MetaPathFinder):
    """Calls `_register` after verl has imported its FSDP module, and leaves `sys.meta_path` when that begins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != FSDP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if importlib.util.find_spec("verl") is None:
    raise ImportError('router_replay.integrations.verl needs verl: pip install "verl==0.9.1"')
if FSDP in sys.modules:
    _register(sys.modules[FSDP])
else:
    sys.meta_path.insert(0, _Once())
