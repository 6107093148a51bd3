"""Every setting of a training run: typed, read from TOML and `--set`, checked, and printed as TOML again.

    config = load_config(pathlib.Path("config.toml"), ["replay=off", "optimizer.lr=1e-5"])
    warnings = check_config(config, world_size=1)  # ConfigError where settings cannot work together
    print(to_toml(config))                         # every setting, as the run will use it

`blocks` has the settings, `load` reads and prints them, `checks` refuses combinations that cannot work, and `toml`
reads and writes TOML text.
"""

from router_replay.rl.config.blocks import (
    AsynchronousConfig,
    Block,
    CheckpointConfig,
    ClusterConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LoggingConfig,
    LossConfig,
    LossKind,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    ReplayMode,
    RolloutConfig,
    TrainConfig,
    TrainerConfig,
    tiny_folder,
)
from router_replay.rl.config.checks import check_config
from router_replay.rl.config.load import config_error, load_config, to_toml

__all__ = [
    "AsynchronousConfig",
    "Block",
    "CheckpointConfig",
    "ClusterConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "LossConfig",
    "LossKind",
    "MegatronConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ReferenceConfig",
    "ReplayMode",
    "RolloutConfig",
    "TrainConfig",
    "TrainerConfig",
    "check_config",
    "config_error",
    "load_config",
    "tiny_folder",
    "to_toml",
]
