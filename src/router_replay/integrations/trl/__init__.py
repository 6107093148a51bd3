"""R3 and R2 in TRL's GRPOTrainer.

    trainer = RouterReplayGRPOTrainer(
        model=folder, reward_funcs=reward, args=GRPOConfig(...), train_dataset=prompts,
        replay="r3", engine=lambda: EmbeddedEngine(folder),      # any engine of router_replay.engines
    )
    trainer.train()

`docs/integrations/trl.md` says what is supported. Importing this package raises ConfigError if the installed TRL is not
one that it was tested with.
"""

from router_replay.integrations.trl import seams

seams.refuse_other_trl()

from router_replay.integrations.trl.generation import EngineGeneration as EngineGeneration  # noqa: E402
from router_replay.integrations.trl.trainer import RouterReplayGRPOTrainer as RouterReplayGRPOTrainer  # noqa: E402

__all__ = ["EngineGeneration", "RouterReplayGRPOTrainer"]
