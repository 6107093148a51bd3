"""Additions in several turns: the policy calls a calculator, and its results come back as environment tokens.

    12+34+56?  <12+34>  [46]  <46+56>  [102]  102 and the end of sequence
    prompt     call     obs.  call     obs.   answer

A turn that ends with > is a call; one that the calculator does not understand is answered by [!]. Any other turn is the
answer and ends the episode. `rollout.max_turns` limits the number of calls.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from router_replay.rl.environments.base import Turn
from router_replay.rl.environments.problems import NumbersTask, operands
from router_replay.rl.environments.text import (
    ended_answer,
    further_tokens,
    one_token,
    prompt_tokens,
)

OPERANDS = 3  # two calls: enough that the second one needs the first one's result
CALL_ENDS = ">"
NOT_UNDERSTOOD = "[!]"
# Any text may precede the last <. The limit of 18 digits keeps the numbers small, whatever the policy writes.
_CALL = re.compile(r"<(\d{1,18})([-+*])(\d{1,18})>$")
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def question(numbers: Sequence[int]) -> str:
    """Return the text of the prompt."""
    return "+".join(map(str, numbers)) + "?"


def call(first: int, second: int) -> str:
    """Return the text of a call that adds two numbers."""
    return f"<{first}+{second}>"


def reply(text: str) -> str:
    """Return the calculator's answer to a turn that ended with a call."""
    found = _CALL.search(text.strip())
    if found is None:
        return NOT_UNDERSTOOD
    first, sign, second = found.groups()
    return f"[{_OPERATIONS[sign](int(first), int(second))}]"


class CalculatorTask(NumbersTask):
    """Ask for the sum of three operands."""

    def __init__(self, tokenizer: Any, digits: int, seed: int) -> None:
        super().__init__(tokenizer, digits, seed)
        self.call_ends = one_token(tokenizer, CALL_ENDS)
        self.stop_token_ids = (self.call_ends,)

    def environment(self) -> CalculatorEnvironment:
        """Return a new environment, for one episode."""
        return CalculatorEnvironment(self)


class CalculatorEnvironment:
    """Reward 1.0 for the right answer followed by the end of sequence, with or without calls, otherwise 0.0."""

    def __init__(self, task: CalculatorTask) -> None:
        self._task = task
        self._answer = ""

    def reset(self, problem: int) -> tuple[int, ...]:
        """Return the prompt of this problem number, such as 12+34+56?."""
        numbers = operands(self._task.seed, problem, OPERANDS, self._task.digits)
        self._answer = str(sum(numbers))
        return prompt_tokens(self._task.tokenizer, question(numbers))

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answer a call with its result; reward any other turn as the answer, and end the episode."""
        tokenizer = self._task.tokenizer
        if token_ids and token_ids[-1] == self._task.call_ends:
            text = reply(str(tokenizer.decode(list(token_ids))))
            return Turn(done=False, observation=further_tokens(tokenizer, text))
        return Turn(reward=float(ended_answer(tokenizer, token_ids, self._task.end) == self._answer))
