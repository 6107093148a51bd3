"""Define the protocol of an environment: it gets and returns token ids, and gives a reward.

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
`GuessTask(tokenizer, seed, highest=60)`. The module is searched on the Python path, and last in the current folder.
`examples/guess_environment.py` is a complete example with several turns.

An episode ends when a turn is `done`, after `rollout.max_turns` turns, or when `engine.max_length` tokens are reached.
Each turn samples at most `rollout.max_tokens` tokens. The history is never tokenised again: the next prompt is the last
prompt, the sampled tokens, and the observation, all as ids. An environment that changes its history gives the whole
next prompt as `Turn.prompt`, and the trajectory branches there. Only sampled tokens bear loss.

An exception in these classes ends the run with a RewardError; the state and the step's rollouts are saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from router_replay.errors import RewardError

if TYPE_CHECKING:
    from router_replay.rl.config import TrainConfig


class EnvironmentLost(RewardError):
    """The process of an environment died, and its episode cannot be played on."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """Hold the environment's answer to the tokens that the policy sampled in one turn.

    - `reward`: a finite number, which is added to the episode's reward.
    - `done`: whether the episode ends here.
    - `observation`: tokens of the environment, which follow the completion in the next prompt.
    - `prompt`: the whole next prompt, in place of `observation`, if the environment changes the history.
    - `kept`: how many of the sampled tokens stay in the trajectory, if the environment read only the first of them.
    """

    reward: float = 0.0
    done: bool = True
    observation: tuple[int, ...] = ()
    prompt: tuple[int, ...] | None = None
    kept: int | None = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """Hold the limits of an episode: the settings `rollout.max_turns`, `rollout.max_tokens` and `engine.max_length`."""

    max_turns: int = 8
    max_tokens: int = 16
    max_length: int = 2048

    @classmethod
    def of(cls, config: TrainConfig) -> Limits:
        """Return the limits of the run with this `config`."""
        return cls(config.rollout.max_turns, config.rollout.max_tokens, config.max_length)


class Environment(Protocol):
    """Play one episode."""

    def reset(self, problem: int) -> Sequence[int]:
        """Start the episode and return the token ids of the prompt. The same `problem` must give the same prompt."""
        ...

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answer `token_ids`, the tokens that the policy sampled in this turn. A stop token is included."""
        ...


class Task(Protocol):
    """Hold what all episodes of a run share. A subclass inherits the defaults and must define `environment`."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a turn, besides the model's end of sequence."""
    problems: int | None = None
    """The number of problems, which are numbered from 0; None: there is no last problem."""
    max_turns: ClassVar[int | None] = None
    """The maximum number of turns of an episode; None: only `rollout.max_turns` limits them. Set it on the class:
    dr_grpo divides by the longest possible episode, so ranks that make no task object read it too."""

    threads: ClassVar[int] = 1
    """How many episodes of the synchronous loop may be reset and stepped at once, in threads. Set it on the class, for
    environments that wait for others. The asynchronous loop has `asynchronous.environment_threads`."""

    @property
    def digest(self) -> str:
        """Return a text that identifies the problems. `--resume` refuses to continue a run if it has changed."""
        return f"problems of {type(self).__module__}.{type(self).__qualname__}"

    def prompt_lengths(self) -> Iterable[tuple[str, int]]:
        """Return the place and the number of tokens of each prompt that is known at the start.

        A prompt that is too long is then refused before the run starts, with its place in the message.
        """
        return ()

    def close(self) -> None:
        """Free what the task holds, at the end of a run. Episodes may be in progress: they must not wait any more."""
        return

    def environment(self) -> Environment:
        """Return a new environment, for one episode."""
        raise NotImplementedError(f"{type(self).__name__} must define environment(self)")
