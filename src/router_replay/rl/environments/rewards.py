"""Reward functions of the user: found by name at the start, called with care.

# grading.py, named in the config as reward = "grading:exact"
def exact(prompt, completion, answer):
    return float(completion.strip() == answer)
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from router_replay.errors import ConfigError, RewardError


class RewardFunction:
    """A user's function whose every fault is a RewardError that names the problem and the function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = _load(name)

    def __call__(self, problem: int, prompt: Any, completion: str, answer: Any) -> float:
        try:
            value = self._function(prompt, completion, answer)
            value = value.item() if hasattr(value, "item") else value  # of NumPy and torch
        except Exception as error:
            raise RewardError(
                f"problem {problem}: the reward function {self.name} raised {type(error).__name__}: {error} "
                f"(completion {completion!r}, answer {answer!r}). It must give a number for whatever a policy writes"
            ) from error
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(
                f"problem {problem}: the reward function {self.name} must give a finite number, got {value!r} "
                f"(completion {completion!r}, answer {answer!r})"
            )
        return float(value)


def _load(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ConfigError(f'environment.reward must be "module:function", such as "grading:exact", got {name!r}')
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # an installed command does not look for modules where the user stands
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"environment.reward = {name!r}: the module {module_name} does not import: {type(error).__name__}: "
            f"{error}. It is looked for in {here} and on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        has = f"is {function!r}" if hasattr(module, function_name) else "is not there"
        raise ConfigError(f"environment.reward = {name!r}: a function was expected; in {module.__file__} it {has}")
    return function
