"""Reward functions of the user: found by name at the start, called with care.

# grading.py, named in the config as reward = "grading:exact"
def exact(prompt, completion, answer):
    return float(completion.strip() == answer)
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
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
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit too: it would end the run with status 0
            raise RewardError(
                f"problem {problem}: the reward function {self.name} raised {type(error).__name__}: {error} "
                f"(completion {completion!r}, answer {answer!r}). It must give a number for whatever a policy writes"
                + _import_hint(error)
            ) from error
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(
                f"problem {problem}: the reward function {self.name} must give a finite number, got {value!r} "
                f"(completion {completion!r}, answer {answer!r})"
            )
        return float(value)


def _import_hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and os.path.exists(f"{error.name.partition('.')[0]}.py"):
        return ". Import modules of the current folder at the top of the reward module: later they are not found"
    return ""


def _load(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ConfigError(f'environment.reward must be "module:function", such as "grading:exact", got {name!r}')
    here = os.getcwd()
    try:
        with _also_from(here):
            module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit at the top of a script, too
        raise ConfigError(
            f"environment.reward = {name!r}: the module {module_name} does not import: {type(error).__name__}: "
            f"{error}. It is looked for on PYTHONPATH and in {here}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        has = f"is {function!r}" if hasattr(module, function_name) else "is not there"
        file = getattr(module, "__file__", None)
        raise ConfigError(
            f"environment.reward = {name!r}: a function was expected; in {file or 'the built-in module'} it {has}"
            + _hidden(module_name, file, here)
        )
    return function


@contextlib.contextmanager
def _also_from(folder: str) -> Iterator[None]:
    """An installed command does not look for modules where the user stands; look there last, for this import alone.

    Last: a file named like an installed module must not take its place. This import alone: whatever the process
    imports later must not be found there by chance.
    """
    importlib.invalidate_caches()  # the file may be newer than what Python knows of the folder
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have put the path in order itself
            sys.path.remove(folder)


def _hidden(module_name: str, file: str | None, here: str) -> str:
    """A hint where the user's own file has the name of an installed module, which was then taken."""
    own = os.path.join(here, *module_name.split("."))
    for candidate in (f"{own}.py", os.path.join(own, "__init__.py")):
        if os.path.exists(candidate) and candidate != file:
            return f". {candidate} was not taken, since an installed module has its name: rename it"
    return ""
