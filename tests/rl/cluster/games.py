"""Environments of three turns that kill their own process once, in the middle of a run.

`FAULTS` names a folder, in which the steps of all processes are counted, and the processes that took one.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

from router_replay.rl.environments import Task, Turn

AT = 40  # the step at which a process dies; a training step has 12 episodes of 3 turns


class Steady(Task):
    """The reward is the number of sevens, and each turn answers with the number of tokens so far."""

    max_turns = 3
    problems = 12

    def __init__(self, tokenizer: Any, seed: int, *, kills: bool = True) -> None:
        self.kills = kills
        self.seven = tokenizer.convert_tokens_to_ids("7")
        self.digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]

    def environment(self) -> Game:
        return Game(self)

    def note(self, tokens: int) -> tuple[int, ...]:
        """The digits that a turn answers with."""
        return (self.digits[tokens % 10],)


class Moody(Steady):
    """It answers otherwise in every process."""

    def note(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.digits[int(digit)] for digit in str(os.getpid()))


class Deadly(Steady):
    """Every step of it kills its process, except the first of an episode."""

    def note(self, tokens: int) -> tuple[int, ...]:
        if tokens > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().note(tokens)


class Broken(Steady):
    """It raises an error of its own."""

    def note(self, tokens: int) -> tuple[int, ...]:
        raise ValueError("no note today")


class Game:
    def __init__(self, task: Steady) -> None:
        self._task, self._tokens, self._turns = task, 0, 0

    def reset(self, problem: int) -> list[int]:
        return [self._task.digits[problem % 10], self._task.digits[problem // 10]]

    def step(self, token_ids: Sequence[int]) -> Turn:
        if self._task.kills:
            count_and_kill()
        self._tokens += len(token_ids)
        self._turns += 1
        reward = float(list(token_ids).count(self._task.seven))
        return Turn(reward, done=self._turns == 3, observation=self._task.note(self._tokens))


def count_and_kill() -> None:
    folder = pathlib.Path(os.environ["FAULTS"])
    with (folder / "steps").open("a") as file:
        file.write(".")
    with (folder / "processes").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if (folder / "steps").stat().st_size >= AT:  # two processes may count before either of them looks
        with contextlib.suppress(FileExistsError):
            (folder / "one_has_died").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
