"""Run environments in Ray actors: `cluster.environments` processes, and a task that plays its episodes in them.

    task = RayTask(task, config)             # on the first rank; the driver has started the actors
    environment = task.environment()         # one of an actor with the fewest episodes
    environment.reset(7), environment.step(tokens)

If the process of an actor dies, Ray starts a new one in its place, and each of its episodes is played again there: the
prompt and the tokens of all turns so far are known. An environment that then answers as before goes on. One that
answers otherwise is lost with its episode, because the policy's tokens belong to the answers that it gave first.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from router_replay.errors import TrainError
from router_replay.rl.cluster.routes import saying
from router_replay.rl.config import TrainConfig
from router_replay.rl.environments import Limits, make_task
from router_replay.rl.environments.base import Environment, EnvironmentLost, Task, Turn
from router_replay.rl.policy.models import load_tokenizer, model_folder

logger = logging.getLogger(__name__)
DEATHS = 3
"""An episode is lost when so many processes die at the same turn of it: the turn may be what kills them."""


def names(config: TrainConfig) -> list[str]:
    """Return the names of the actors in which the environments of a run are."""
    return [f"environment{number}" for number in range(config.cluster.environments)]


class EnvironmentActor:
    """Hold the task of a run, and the environments of the episodes that are played in this process.

    `config` is that of the run, and `folder` the driver's current folder, where the user's modules may be.
    """

    def __init__(self, config: TrainConfig, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another machine need not have it
            os.chdir(folder)
        tokenizer = load_tokenizer(model_folder(config.model.path))
        self._task = make_task(config.environment, tokenizer, config.seed, Limits.of(config))
        self._open: dict[str, Environment] = {}

    def where(self) -> tuple[str, int]:
        """Return the node of this actor, and its process id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def reset(self, episode: str, problem: int, ended: Sequence[str]) -> tuple[int, ...]:
        """Start the `episode` of a problem, and return its prompt. Episodes that have `ended` are forgotten."""
        for one in ended:
            self._open.pop(one, None)
        environment = self._task.environment()
        prompt = tuple(int(token) for token in environment.reset(problem))
        self._open[episode] = environment
        return prompt

    def step(self, episode: str, token_ids: list[int]) -> Turn | None:
        """Return the answer to `token_ids`; None if this process does not know the episode."""
        environment = self._open.get(episode)
        return None if environment is None else environment.step(token_ids)


class _Worker:
    """One actor, as the first rank sees it: how many episodes it has, and which it may forget."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.episodes = 0
        self.ended: collections.deque[str] = collections.deque()
        try:
            self.actor = ray.get_actor(name)
        except ValueError as error:
            raise TrainError(f"{name} has no actor in this Ray cluster: {error}") from error

    def leave(self, episode: str) -> None:
        """Note that an episode has ended. It is called by the garbage collector, and so calls nothing."""
        self.episodes -= 1
        self.ended.append(episode)

    def forgotten(self) -> list[str]:
        """Return the episodes that ended since the last call."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self.ended.popleft())
        return found


class RayTask:
    """The `task` of a run, whose episodes are played in the actors of its `config`. All else is that of the task."""

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self._task = task
        self._workers = [_Worker(name) for name in names(config)]
        self._choosing = threading.Lock()
        for worker in self._workers:  # an environment that cannot be made there is an error at the start
            _reached(worker, config.cluster.start_timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    @property
    def name(self) -> str:
        """The name of the task in messages."""
        return type(self._task).__name__

    def environment(self) -> RayEnvironment:
        """Return a new environment, for one episode, in the actor with the fewest of them."""
        with self._choosing:
            worker = min(self._workers, key=lambda one: one.episodes)
            worker.episodes += 1
        return RayEnvironment(worker, self.name)


class RayEnvironment:
    """Represent the environment of one episode in an actor. `task` is for messages."""

    def __init__(self, worker: _Worker, task: str) -> None:
        self._worker, self._task = worker, task
        self._episode = uuid.uuid4().hex
        self._problem, self._prompt = -1, ()
        self._played: list[tuple[list[int], Turn]] = []
        weakref.finalize(self, worker.leave, self._episode)

    @property
    def name(self) -> str:
        """The name of the environment in messages."""
        return f"the environment of {self._task} in {self._worker.name}"

    def reset(self, problem: int) -> tuple[int, ...]:
        """Start the episode and return the token ids of the prompt."""
        self._problem = problem
        self._prompt = self._surviving(self._first_reset)
        return self._prompt

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answer `token_ids`, the tokens that the policy sampled in this turn."""
        tokens = [int(token) for token in token_ids]

        def answer() -> Turn:
            turn = self._call("step", self._episode, tokens)
            if turn is not None:
                return turn
            self._play_again()  # the process is a new one
            return self._call("step", self._episode, tokens)

        turn = self._surviving(answer)
        self._played.append((tokens, turn))
        return turn

    def _first_reset(self) -> tuple[int, ...]:
        return self._call("reset", self._episode, self._problem, self._worker.forgotten())

    def _play_again(self) -> None:
        """Bring a new process to the turn that the last one had reached."""
        if self._first_reset() != self._prompt:
            raise self._lost("its reset then gave another prompt")
        for number, (tokens, turn) in enumerate(self._played):
            if not _same(self._call("step", self._episode, tokens), turn):
                raise self._lost(f"it then answered turn {number} otherwise")

    def _surviving(self, call: Any) -> Any:
        """Return what `call` returns. If the process dies meanwhile, call again when there is a new one."""
        for _ in range(DEATHS):
            try:
                return call()
            except RayActorError as error:
                logger.warning("%s died at problem %d (%s)", self._worker.name, self._problem, type(error).__name__)
                _reached(self._worker)
        raise self._lost(f"that happened {DEATHS} times at turn {len(self._played)}")

    def _call(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self._worker.actor, method).remote(*arguments)
        with saying(lambda: f"waiting for {self._worker.name}, which does {method} of problem {self._problem}"):
            try:
                return ray.get(answer)
            except RayTaskError as error:
                raise error.cause from None

    def _lost(self, why: str) -> EnvironmentLost:
        return EnvironmentLost(
            f"problem {self._problem}: the process of its environment ({self._worker.name}) died, and {why}: the "
            "episode cannot be played on"
        )


def _reached(worker: _Worker, limit: float = 600.0) -> None:
    """Wait until the actor answers, at most `limit` seconds."""
    deadline = time.monotonic() + limit
    with saying(lambda: f"waiting for {worker.name}, which starts"):
        while True:
            try:
                ray.get(worker.actor.where.remote(), timeout=max(1.0, deadline - time.monotonic()))
                return
            except ActorUnavailableError as error:
                if time.monotonic() > deadline:
                    raise TrainError(f"{worker.name} did not start within {limit:g} s") from error
                time.sleep(0.1)
            except ray.exceptions.GetTimeoutError as error:
                raise TrainError(f"{worker.name} did not start within {limit:g} s (cluster.start_timeout)") from error
            except RayActorError as error:
                raise TrainError(f"{worker.name} could not start: {error}") from error


def _same(turn: Turn | None, other: Turn) -> bool:
    """Return whether two answers mean the same to the policy."""
    if turn is None:
        return False
    mine, theirs = (
        (float(one.reward), bool(one.done), list(one.observation), None if one.prompt is None else list(one.prompt))
        for one in (turn, other)
    )
    return mine == theirs
