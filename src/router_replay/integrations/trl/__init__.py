"""R3 and R2 in TRL's GRPOTrainer.

    trainer = RouterReplayGRPOTrainer(
        model=folder, reward_funcs=reward, args=GRPOConfig(...), train_dataset=prompts,
        replay="r3", engine=lambda: EmbeddedEngine(folder),      # any engine of router_replay.engines
    )
    trainer.train()

`docs/integrations/trl.md` says what is supported. Importing a name from here raises ConfigError if the installed TRL is
not one that it was tested with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {"EngineGeneration": "generation", "RouterReplayGRPOTrainer": "trainer"}

__all__ = ["EngineGeneration", "RouterReplayGRPOTrainer"]

if TYPE_CHECKING:
    from router_replay.integrations.trl.generation import EngineGeneration as EngineGeneration
    from router_replay.integrations.trl.trainer import RouterReplayGRPOTrainer as RouterReplayGRPOTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from router_replay.integrations.trl import seams

    seams.refuse_other_trl()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
