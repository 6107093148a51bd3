"""Reward functions that the tests name in their configs."""

from __future__ import annotations

import asyncio
import sys
from typing import Any


def sevens(prompt: str, completion: str, answer: Any) -> float:
    """A random model gets different rewards from it, so that there is something to learn."""
    return completion.count("7") + 0.1 * len(completion)


def breaks(prompt: str, completion: str, answer: Any) -> float:
    raise KeyError("the grader fell over")


def exits(prompt: str, completion: str, answer: Any) -> float:
    sys.exit(0)


def is_cancelled(prompt: str, completion: str, answer: Any) -> float:
    raise asyncio.CancelledError
