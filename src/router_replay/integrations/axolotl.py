"""R3 and R2 in axolotl's GRPO, as a plugin over `router_replay.integrations.trl`.

    plugins:
      - router_replay.integrations.axolotl.RouterReplayPlugin
    router_replay: r3                             # or r2, or off
    router_replay_engine: rollouts.make_engine    # a function of yours that returns an engine of router_replay.engines

`docs/integrations/axolotl.md` says what is supported. axolotl logs a plugin that it cannot import and goes on without
it, so look for the line that starts with `[router_replay]`.
"""

from __future__ import annotations

import importlib
from typing import Any

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.integrations.base import BasePlugin, PluginManager
from pydantic import BaseModel, field_validator

from router_replay.errors import ConfigError
from router_replay.integrations.trl import RouterReplayGRPOTrainer

TRAINER = f"{__name__}.RouterReplayAxolotlTrainer"


class RouterReplayArgs(BaseModel):
    """The plugin's keys in axolotl's config; RouterReplayGRPOTrainer describes them.

    `router_replay` is its `replay`, `router_replay_engine` the dotted name of a function without arguments that makes
    its `engine`, and the others are its arguments of the same name.
    """

    router_replay: str = "r3"
    router_replay_engine: str | None = None
    router_replay_on_missing: str = "raise"
    router_replay_seeded: bool = True
    router_replay_weights: str = ""
    router_replay_routing_metrics: bool = True

    @field_validator("router_replay", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of a bare off


class RouterReplayAxolotlTrainer(RouterReplayGRPOTrainer, AxolotlGRPOTrainer):
    """axolotl's GRPO trainer with replay. All arguments are those that axolotl gives to its own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **replay_arguments(PluginManager.get_instance().cfg), **named)


class RouterReplayPlugin(BasePlugin):
    """Puts RouterReplayAxolotlTrainer in the place of axolotl's GRPO trainer, and closes its engine at the end."""

    _trainer: RouterReplayAxolotlTrainer | None = None

    def get_input_args(self) -> str:
        """Return where axolotl finds the keys that this plugin adds to its config."""
        return f"{__name__}.RouterReplayArgs"

    def register(self, cfg: Any) -> None:
        """Choose the trainer in `cfg`, the config as the user wrote it, or refuse a run that cannot replay."""
        if (why := why_not(cfg)) is not None:
            raise ConfigError(f"the plugin {type(self).__name__} cannot work here: {why}")
        cfg["trainer_cls"] = TRAINER  # by get_trainer_cls, axolotl would pass neither the model nor the rewards

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Say what is replayed, in the first process."""
        self._trainer = trainer
        if trainer.accelerator.is_main_process:
            print(f"[router_replay] {trainer.replay} on {trainer.replayer}", flush=True)  # noqa: T201

    def post_train(self, cfg: Any, model: Any) -> None:
        """Close the engine."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def why_not(cfg: Any) -> str | None:
    """Return why a run with the config `cfg`, as the user wrote it, cannot replay, or None if it can."""
    trl = cfg.get("trl") or {}
    if cfg.get("rl") != "grpo":
        return f"it replays in GRPO, and this config has rl: {cfg.get('rl')}"
    if cfg.get("trainer_cls") not in (None, TRAINER):
        return f"it brings its own trainer, and this config has trainer_cls: {cfg['trainer_cls']}"
    if (cfg.get("context_parallel_size") or 1) > 1:
        return "axolotl cuts sequences over processes with context_parallel_size above 1, and rows would not follow"
    for name in ("async_prefetch", "use_data_producer"):
        if trl.get(name):
            return f"trl.{name} uses axolotl's asynchronous trainer, whose samples have no place for routes"
    if cfg.get("batch_flattening"):
        return "batch_flattening lays tokens out anew after the rows were laid out"
    return None


def replay_arguments(cfg: Any) -> dict[str, Any]:
    """Return the arguments of RouterReplayGRPOTrainer that the keys of `cfg`, axolotl's config, stand for."""
    keys = RouterReplayArgs(
        **{name: cfg[name] for name in RouterReplayArgs.model_fields if cfg.get(name) is not None}
    ).model_dump()
    name = keys.pop("router_replay_engine")
    return {
        "replay": keys.pop("router_replay"),
        "engine": None if name is None else _function(name),
        **{key.removeprefix("router_replay_"): value for key, value in keys.items()},
    }


def _function(name: str) -> Any:
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"router_replay_engine: {name} must be the dotted name of a function that returns an engine, such as "
            f"rollouts.make_engine, in a module that Python finds: {error}"
        ) from error
