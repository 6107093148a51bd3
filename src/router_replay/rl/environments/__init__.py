"""What the policy is asked, and what its answers are worth."""

from __future__ import annotations

from typing import Any

from router_replay.rl.config import EnvironmentConfig
from router_replay.rl.environments.arithmetic import ArithmeticTask
from router_replay.rl.environments.base import Environment, Task, Turn
from router_replay.rl.environments.calculator import CalculatorTask
from router_replay.rl.environments.jsonl import JsonlTask

__all__ = ["Environment", "Task", "Turn", "make_task"]


def make_task(config: EnvironmentConfig, tokenizer: Any, seed: int) -> Task:
    """The task of a config; whatever is wrong with its files and functions is said here, not in the first step."""
    if config.kind == "arithmetic":
        return ArithmeticTask(tokenizer, config.digits, seed)
    if config.kind == "calculator":
        return CalculatorTask(tokenizer, config.digits, seed)
    return JsonlTask(tokenizer, config.file, config.reward)
