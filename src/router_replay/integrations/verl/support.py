"""Which verl, which transformers and which settings can replay; the others are refused before verl builds the model."""

from __future__ import annotations

import functools
from typing import Any

from router_replay.errors import ReplayError
from router_replay.families import versions

TRIED = ("0.9.1",)  # this integration overrides methods of verl that are not public, so each version must be tried
OLDEST_TRANSFORMERS = "5.10.4"
VENDORS = ("nvidia", "amd")  # of the device "cuda"
CONFIG = "verl.workers.config.EngineRouterReplayConfig"


def mode_of(engine_config: Any) -> str:
    """Return what `router_replay.mode` of verl's `engine_config` asks for: "disabled", "R2" or "R3"."""
    asked = getattr(engine_config, "router_replay", None) or {}
    return str(asked.get("mode", "disabled"))


def wrong_version() -> str | None:
    """Return why replay is refused with the installed verl and transformers, or None if both were tried."""
    import verl

    if verl.__version__ not in TRIED:
        return f"it was tried with verl {', '.join(TRIED)}, and this is verl {verl.__version__}; install a tried one"
    if versions.is_older(OLDEST_TRANSFORMERS):
        return f"it needs transformers {OLDEST_TRANSFORMERS} or newer, and this is {versions.installed()}"
    return None


def guard(fsdp_engine: type) -> None:
    """Let `fsdp_engine`, the base class of all of verl's FSDP engines, refuse to be made where replay cannot work.

    Without this, verl's own engines ignore `router_replay.mode` and train with live routing.
    """
    make = fsdp_engine.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def checked(engine: Any, model_config: Any, engine_config: Any, *others: Any, **named: Any) -> None:
        mode = mode_of(engine_config)
        if mode != "disabled" and (why := why_not(engine, model_config, engine_config)) is not None:
            raise ReplayError(f"router_replay.mode={mode} cannot work here: {why}")
        make(engine, model_config, engine_config, *others, **named)

    fsdp_engine.__init__ = checked  # type: ignore[misc]


def why_not(engine: Any, model_config: Any, engine_config: Any) -> str | None:
    """Return why `engine`, which is not initialized yet, cannot replay with its two configs, or None if it can."""
    if (why := wrong_version()) is not None:
        return why
    from router_replay.integrations.verl.engine import FSDPEngineWithRouterReplay

    if engine_config.strategy not in ("fsdp", "fsdp2"):
        return f"strategy={engine_config.strategy} builds and shards experts in its own way; use fsdp or fsdp2"
    if model_config.model_type != "language_model":
        return f"a {model_config.model_type} has no recorded routes; set it for the actor only"
    if not isinstance(engine, FSDPEngineWithRouterReplay):
        return (
            f"verl chose {type(engine).__name__} for this device and vendor, and Router Replay has an engine for cuda "
            f"by {' and '.join(VENDORS)} only (VERL_ENGINE_DEVICE and VERL_ENGINE_VENDOR override what verl detects)"
        )
    if engine_config.forward_only:
        return "the reference model routes live; set it for the actor only"
    return _wrong_setting(model_config, engine_config)


def _wrong_setting(model_config: Any, engine_config: Any) -> str | None:
    from verl.workers.config import EngineRouterReplayConfig

    asked = engine_config.router_replay
    if not isinstance(asked, EngineRouterReplayConfig):
        return (
            "verl did not check this setting, nor R2 against bypass_mode, because its type is missing: add "
            f"+actor_rollout_ref.actor.fsdp_config.router_replay._target_={CONFIG}"
        )
    if asked.record_file is not None or asked.replay_file is not None:
        return "routes travel in verl's batches; remove router_replay.record_file and replay_file"
    if engine_config.ulysses_sequence_parallel_size > 1 and hasattr(model_config.hf_config, "vision_config"):
        return "verl cuts the sequence of a vision model inside the model; set ulysses_sequence_parallel_size=1"
    return None
