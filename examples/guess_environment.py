"""An environment of one's own, with several turns: guess a number between two bounds, which each reply narrows.

    10+90=   50<end>   51+90=   70<end>   51+69=   60<end>
    prompt   guess     reply    guess     reply    right

`examples/guess.toml` names it as `environment.kind = "examples.guess_environment:GuessTask"`. The bounds are written
like an addition, since the tiny model of this package answers additions with a number; any tokenizer with digits,
`+` and `=` will do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from router_replay.rl.environments import Task, Turn, further_tokens, prompt_tokens


class GuessTask(Task):
    """What all episodes share. The trainer makes one: `GuessTask(tokenizer, seed, **environment.arguments)`."""

    def __init__(self, tokenizer: Any, seed: int, *, lowest: int = 10, highest: int = 99) -> None:
        if not 0 <= lowest < highest:
            raise ValueError(f"expected 0 <= lowest < highest, got {lowest} and {highest}")
        self.tokenizer, self.seed = tokenizer, seed
        self.lowest, self.highest = lowest, highest

    @property
    def digest(self) -> str:
        """Other bounds or another seed are other problems: a resumed run must not change them."""
        return f"numbers from {self.lowest} to {self.highest}, seed {self.seed}"

    def environment(self) -> GuessEnvironment:
        return GuessEnvironment(self)


class GuessEnvironment:
    """One episode: 1.0 for the right number, 0.1 for every other guess between the bounds."""

    def __init__(self, task: GuessTask) -> None:
        self._task = task

    def reset(self, problem: int) -> Sequence[int]:
        """Choose the number by the problem's own seed: a group of episodes must get the same one."""
        task = self._task
        self._low, self._high = task.lowest, task.highest
        self._secret = random.Random(f"{task.seed}/{problem}").randint(task.lowest, task.highest)
        return prompt_tokens(task.tokenizer, self._bounds())

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answer a guess with narrower bounds; end at the right number, and at what is no number."""
        text = self._task.tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()
        if not (text.isascii() and text.isdigit()):
            return Turn(reward=0.0, done=True)
        guess = int(text)
        if guess == self._secret:
            return Turn(reward=1.0, done=True)
        inside = self._low <= guess <= self._high
        if inside and guess < self._secret:
            self._low = guess + 1
        elif inside:
            self._high = guess - 1
        return Turn(
            reward=0.1 if inside else 0.0,
            done=False,
            observation=further_tokens(self._task.tokenizer, self._bounds()),
        )

    def _bounds(self) -> str:
        return f"{self._low}+{self._high}="
