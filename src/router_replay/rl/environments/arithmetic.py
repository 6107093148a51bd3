"""Additions in one turn: the right answer to 12+34= is 46 and the end of sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router_replay.rl.environments.base import Turn
from router_replay.rl.environments.problems import NumbersTask, operands
from router_replay.rl.environments.text import ended_answer, prompt_tokens


def question(first: int, second: int) -> str:
    """Return the text of the prompt."""
    return f"{first}+{second}="


class ArithmeticTask(NumbersTask):
    """Ask for the sum of two operands."""

    max_turns: ClassVar[int | None] = 1

    def environment(self) -> ArithmeticEnvironment:
        """Return a new environment, for one episode."""
        return ArithmeticEnvironment(self)


class ArithmeticEnvironment:
    """Reward 1.0 for the right answer followed by the end of sequence, otherwise 0.0."""

    def __init__(self, task: ArithmeticTask) -> None:
        self._task = task
        self._answer = ""

    def reset(self, problem: int) -> tuple[int, ...]:
        """Return the prompt of this problem number, such as 12+34=."""
        first, second = operands(self._task.seed, problem, count=2, digits=self._task.digits)
        self._answer = str(first + second)
        return prompt_tokens(self._task.tokenizer, question(first, second))

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Reward the answer and end the episode."""
        answer = ended_answer(self._task.tokenizer, token_ids, self._task.end)
        return Turn(reward=float(answer == self._answer))
