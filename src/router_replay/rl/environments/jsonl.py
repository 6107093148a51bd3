"""Read prompts and answers from a file with one JSON object per line. A function of the user returns the rewards.

    {"prompt": "12+34=", "answer": "46"}
    {"prompt": [{"role": "user", "content": "What is 12+34?"}], "answer": "46"}

Messages go through the tokenizer's chat template. Every line is read, checked and tokenised at the start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.environments.base import Task, Turn
from router_replay.rl.environments.rewards import RewardFunction
from router_replay.rl.environments.text import prompt_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Hold one line of the file; `line` is its number."""

    line: int
    prompt: str | list[dict[str, Any]]
    answer: Any
    token_ids: npt.NDArray[np.int32]


class JsonlTask(Task):
    """Ask the problems of a file: its lines in order, without blank ones."""

    max_turns: ClassVar[int | None] = 1

    def __init__(self, tokenizer: Any, file: str, reward: str) -> None:
        if not file:
            raise ConfigError(
                'environment.kind = "jsonl" needs environment.file: set it to the file of prompts and answers'
            )
        self.tokenizer = tokenizer
        self.reward = RewardFunction(reward)
        self.file = file
        self.lines = read_problems(pathlib.Path(file), tokenizer)
        self.problems = len(self.lines)

    @property
    def digest(self) -> str:
        """Return a digest of prompts and answers. The name and the layout of the file do not matter."""
        digest = hashlib.sha256()
        for problem in self.lines:
            digest.update(json.dumps([problem.prompt, problem.answer], sort_keys=True).encode() + b"\n")
        return f"{len(self.lines)} problems (digest {digest.hexdigest()[:16]})"

    def prompt_lengths(self) -> Iterable[tuple[str, int]]:
        """Return the file and line, and the number of tokens, of every prompt."""
        return ((f"{self.file}, line {problem.line}", len(problem.token_ids)) for problem in self.lines)

    def environment(self) -> JsonlEnvironment:
        """Return a new environment, for one episode."""
        return JsonlEnvironment(self)


class JsonlEnvironment:
    """Play one turn. The reward function gets the prompt of the file, and the completion without special tokens."""

    def __init__(self, task: JsonlTask) -> None:
        self._task = task
        self._problem = 0

    def reset(self, problem: int) -> tuple[int, ...]:
        """Return the prompt of this problem number."""
        lines = self._task.lines
        if not 0 <= problem < len(lines):
            raise TrainError(f"expected a problem number from 0 to {len(lines) - 1}, got {problem}")
        self._problem = problem
        return tuple(lines[problem].token_ids.tolist())

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Call the reward function and end the episode."""
        line = self._task.lines[self._problem]
        completion = str(self._task.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return Turn(reward=self._task.reward(self._problem, line.prompt, completion, line.answer))


def read_problems(file: pathlib.Path, tokenizer: Any) -> list[Problem]:
    """Read, check and tokenise all lines; a ConfigError names the first bad one."""
    try:
        raw = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"environment.file = {str(file)!r} cannot be read: {reason}") from error
    problems = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            try:
                problems.append(_problem(number, line, tokenizer))
            except ConfigError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from error.__cause__
    if not problems:
        raise ConfigError(f"{file} has no problems: expected one JSON object per line")
    return problems


def _problem(number: int, line: bytes, tokenizer: Any) -> Problem:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'expected an object with "prompt" and "answer", got {fields!r:.80}')
    for name in ("prompt", "answer"):
        if name not in fields:
            raise ConfigError(f'the field "{name}" is missing; this object has {sorted(fields)}')
    prompt = fields["prompt"]
    _check_prompt(prompt)
    try:
        token_ids = _tokens(prompt, tokenizer)
    except Exception as error:  # from the chat template, or for a character that the tokenizer does not know
        raise ConfigError(f"the prompt cannot be tokenised: {type(error).__name__}: {error}") from error
    if not token_ids:
        raise ConfigError("the prompt has no tokens: expected at least one")
    return Problem(number, prompt, fields["answer"], np.array(token_ids, np.int32))


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f'"prompt" must be text or a list of chat messages, got {prompt!r:.80}')
    for position, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f'message {position} of "prompt" must have "role" and "content", got {message!r:.80}')


def _tokens(prompt: str | list[dict[str, Any]], tokenizer: Any) -> Sequence[int]:
    if isinstance(prompt, str):
        return prompt_tokens(tokenizer, prompt)
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
