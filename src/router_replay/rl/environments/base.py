"""What an environment is: tokens in, tokens out, and a reward.

    task = make_task(EnvironmentConfig(kind="calculator"), tokenizer, seed=0)
    environment = task.environment()                     # one per episode
    prompt = environment.reset(problem=7)                # 12+34+56?
    turn = environment.step(tokens)                      # the policy wrote <12+34>
    turn.observation                                     # [46], which follows the completion in the next prompt
    turn = environment.step(tokens)                      # ... until turn.done; turn.reward is added up

History is never tokenised again: the next prompt is the last one, what was sampled, and the observation, as ids. An
environment that changes what came before says so by `Turn.prompt`, and the trajectory branches there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the environment says to what the policy wrote."""

    reward: float = 0.0
    """Added to the episode's reward."""
    done: bool = True
    observation: tuple[int, ...] = ()
    """Environment tokens, appended after the completion."""
    prompt: tuple[int, ...] | None = None
    """Instead of an observation: the whole next prompt, where the environment rewrites history."""


class Environment(Protocol):
    """One episode at a time."""

    def reset(self, problem: int) -> Sequence[int]:
        """The prompt's tokens; the same problem number gives the same prompt."""
        ...

    def step(self, token_ids: Sequence[int]) -> Turn:
        """`token_ids`: what the policy sampled since, without the prompt, with the stop token where there was one."""
        ...


class Task(Protocol):
    """What all episodes of a run share."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn, besides the model's end of sequence."""
        ...

    @property
    def problems(self) -> int | None:
        """How many there are, numbered from 0; None: no end."""
        ...

    @property
    def digest(self) -> str:
        """Which problems these are, in words: another text means other problems."""
        ...

    def prompt_lengths(self) -> Iterable[tuple[str, int]]:
        """The place and the number of tokens of every prompt that can be known at the start."""
        ...

    def environment(self) -> Environment: ...
