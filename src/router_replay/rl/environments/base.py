"""The protocol of an environment: tokens in, tokens out, and a reward.

    task = make_task(EnvironmentConfig(kind="calculator"), tokenizer, seed=0)
    environment = task.environment()                     # one per episode
    prompt = environment.reset(problem=7)                # 12+34+56?
    turn = environment.step(tokens)                      # the policy wrote <12+34>
    turn.observation                                     # [46], which follows the completion in the next prompt
    turn = environment.step(tokens)                      # ... until turn.done; the rewards are added up

To train on an environment of your own, write two classes and name the first one in the config:

    # games.py, named as environment.kind = "games:GuessTask"
    class GuessTask(Task):                               # made once per run
        def __init__(self, tokenizer, seed, *, highest=99): ...
        def environment(self): return GuessEnvironment(self)

    class GuessEnvironment:                              # made for each episode
        def reset(self, problem): ...                    # -> the prompt's token ids
        def step(self, token_ids): ...                   # -> Turn

The settings under `environment.arguments` become keyword arguments: `highest = 60` calls
`GuessTask(tokenizer, seed, highest=60)`. The module is looked for on the Python path, and last in the current folder.
`examples/guess_environment.py` is a whole example with several turns.

An episode ends when a turn is `done`, after `rollout.max_turns` turns, or when `engine.max_length` tokens are reached.
Each turn samples at most `rollout.max_tokens` tokens. The history is never tokenised again: the next prompt is the last
prompt, the sampled tokens, and the observation, all as ids. An environment that changes its history gives the whole
next prompt as `Turn.prompt`, and the trajectory branches there. Only sampled tokens bear loss.

An exception in these classes ends the run with a RewardError; the state and the step's rollouts are saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol


@dataclasses.dataclass(frozen=True)
class Turn:
    """The environment's answer to what the policy wrote."""

    reward: float = 0.0
    """Added to the episode's reward; a finite number."""
    done: bool = True
    """Whether the episode ends here."""
    observation: tuple[int, ...] = ()
    """Tokens of the environment, appended after the completion."""
    prompt: tuple[int, ...] | None = None
    """The whole next prompt, in place of an observation, where the environment rewrites history."""


class Environment(Protocol):
    """One episode."""

    def reset(self, problem: int) -> Sequence[int]:
        """Start the episode and return the prompt's tokens; the same problem number always gives the same prompt."""
        ...

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answer the tokens that the policy sampled in this turn, its stop token included where there was one."""
        ...


class Task(Protocol):
    """What all episodes of a run share. Subclass it to inherit the defaults; only `environment` has none."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a turn, besides the model's end of sequence."""
    problems: int | None = None
    """How many problems there are, numbered from 0; None: without end."""
    max_turns: ClassVar[int | None] = None
    """The most turns that any episode takes; None: only `rollout.max_turns` limits them. It is set on the class, since
    ranks that play no episodes read it too: dr_grpo divides by the longest possible episode."""

    @property
    def digest(self) -> str:
        """Says which problems these are. `--resume` refuses to go on when the text is another one."""
        return f"problems of {type(self).__module__}.{type(self).__qualname__}"

    def prompt_lengths(self) -> Iterable[tuple[str, int]]:
        """The place and the number of tokens of the prompts that are known at the start, to refuse those too long."""
        return ()

    def environment(self) -> Environment:
        """A new environment, for one episode."""
        raise NotImplementedError(f"{type(self).__name__} must define environment(self)")
