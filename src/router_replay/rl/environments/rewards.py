"""Call reward functions of the user, for the jsonl environment.

# grading.py, named in the config as environment.reward = "grading:exact"
def exact(prompt, completion, answer):
    return float(completion.strip() == answer)
"""

from __future__ import annotations

import math
from typing import Any

from router_replay.errors import RewardError
from router_replay.rl import users_code


class RewardFunction:
    """Call a user's function. Any error in it becomes a RewardError that names the problem and the function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = users_code.load(name, "environment.reward", "function")

    def __call__(self, problem: int, prompt: Any, completion: str, answer: Any) -> float:
        """Return the reward of one completion, as a finite float."""
        what = f"problem {problem}: the reward function {self.name}"
        case = f" (completion {completion!r}, answer {answer!r})"
        advice = f"{case}. It must return a number for every completion"
        with users_code.guarded(what, RewardError, advice, through=()):
            value = self._function(prompt, completion, answer)
            value = value.item() if hasattr(value, "item") else value  # of NumPy and torch
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"{what} must return a finite number, got {value!r}{case}")
        return float(value)
