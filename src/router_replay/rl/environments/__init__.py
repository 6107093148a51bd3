"""Environments: they ask the policy and reward its answers. `base` says how to write an environment of your own."""

from __future__ import annotations

from typing import Any

from router_replay.errors import ConfigError
from router_replay.rl import users_code
from router_replay.rl.config import EnvironmentConfig
from router_replay.rl.environments.base import Environment, Limits, Task, Turn
from router_replay.rl.environments.text import further_tokens, prompt_tokens

__all__ = ["Environment", "Limits", "Task", "Turn", "further_tokens", "make_task", "prompt_tokens"]

_MEMBERS = ("stop_token_ids", "problems", "max_turns", "digest", "prompt_lengths", "environment")


def make_task(config: EnvironmentConfig, tokenizer: Any, seed: int, limits: Limits | None = None) -> Task:
    """Make the task of a config. Errors in its files, functions and classes raise here, not in the first step.

    `limits` are those of the run's rollouts, which the agent environment tells its programs.
    """
    kind = config.task_class
    if config.kind == "agent":
        return kind(tokenizer, config, seed, limits or Limits())
    if config.kind in ("arithmetic", "calculator"):
        return kind(tokenizer, config.digits, seed)
    if config.kind == "jsonl":
        return kind(tokenizer, config.file, config.reward)
    place = f"environment.kind = {config.kind!r}"
    given = ", ".join(["tokenizer", f"seed={seed}", *(f"{name}={value!r}" for name, value in config.arguments.items())])
    with users_code.guarded(f"{place}: {kind.__name__}({given})", ConfigError):
        task = kind(tokenizer, seed, **config.arguments)
        missing = [name for name in _MEMBERS if not hasattr(task, name)]
    if missing:
        raise ConfigError(
            f"{place}: {kind.__name__} lacks {', '.join(missing)}; derive it from router_replay.rl.environments.Task, "
            "which has all but environment"
        )
    return task
