"""Play the episodes of a step: environments ask, the engine answers, and the answers are stitched into trajectories.

    rollout = Rollout(engine, task, problems=range(8), config=config.rollout, max_length=512, seed=(0, step))
    episodes = rollout.run()

All episodes take their turns together, with one batch of requests per turn, so the same seeds give the same batches.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request
from router_replay.errors import EngineError
from router_replay.rl.config import RolloutConfig
from router_replay.rl.environments.base import Task
from router_replay.rl.rollout.player import Episode, Keep, Player, seed_of

S = TypeVar("S")
T = TypeVar("T")


class Rollout:
    """Play the episodes of one training step. If `run` raises, `episodes` holds what was played until then.

    `problems` are the problem numbers, each of which gets `config.group` episodes. `max_length` limits prompt and
    completion together. `seed` decides all samples of the step. `on_turn` is called before each turn. `keep` puts the
    rows of finished episodes away, so that this process has those of the others only. `threads` environments take their
    steps at the same time.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        problems: Sequence[int],
        config: RolloutConfig,
        *,
        max_length: int,
        seed: Sequence[int],
        on_turn: Callable[[], object] = lambda: None,
        keep: Keep | None = None,
        threads: int = 1,
    ) -> None:
        self._engine, self._config = engine, config
        self._player = Player(engine, task, config, max_length, keep)
        self._one_by_one, self._threads = keep is not None, max(threads, getattr(task, "threads", 1))
        self.seconds_in_environments = 0.0  # by the clock: several threads may step at once
        self._seed, self._on_turn = seed, on_turn
        self.episodes: list[Episode] = []
        wanted = [(group, problem) for group, problem in enumerate(problems) for _ in range(config.group)]
        numbered = [(number, *one) for number, one in enumerate(wanted)]
        for episode in self._together(lambda one: self._player.reset(*one), numbered):
            if self.episodes and self.episodes[-1].group == episode.group:
                self._player.refuse_other_prompt(episode, self.episodes[-1].prompt)
            self.episodes.append(episode)

    def run(self) -> list[Episode]:
        """Play all episodes to their end."""
        for turn in range(self._player.turns):
            waiting = [episode for episode in self.episodes if not episode.done and self._player.room(episode)]
            if not waiting:
                break
            self._on_turn()
            requests = self._first_requests() if turn == 0 else [self._request(e, turn) for e in waiting]
            prompts = [request.token_ids for request in requests for _ in range(request.sampling.n)]
            sampled: list[list[int]] = [[]] * len(waiting)
            # Append all completions first, so that they are kept if an environment raises.
            for place, completion in self._answers(requests, len(waiting)):
                self._append(waiting[place], prompts[place], completion)
                sampled[place] = completion.token_ids.tolist()
                if turn == self._player.turns - 1:
                    self._player.put_away(waiting[place])
            began = time.perf_counter()
            list(self._together(lambda turn: self._player.step(*turn), zip(waiting, prompts, sampled, strict=True)))
            self.seconds_in_environments += time.perf_counter() - began
            for episode in waiting:
                if episode.done or not self._player.room(episode):
                    self._player.put_away(episode)
        return self.episodes

    def _answers(self, requests: Sequence[Request], episodes: int) -> Iterator[tuple[int, Completion]]:
        """Yield the completions, each with the number of its episode among those that wait.

        If rows are put away, the answer to a request is yielded as soon as it is there, so that few are held at once.
        """
        if not self._one_by_one:
            completions = self._engine.generate(requests)
            if len(completions) != episodes:
                raise EngineError(f"expected {episodes} completions, one per episode, got {len(completions)}")
            yield from enumerate(completions)
            return
        first = np.cumsum([0, *(request.sampling.n for request in requests)]).tolist()
        for number, samples in as_answered(self._engine, requests):
            expected = requests[number].sampling.n
            if len(samples) != expected:
                raise EngineError(f"{requests[number].id}: expected {expected} completions, got {len(samples)}")
            yield from enumerate(samples, start=first[number])

    def _together(self, work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """Yield the results of `work` in order; several items are worked on at once if the task has threads."""
        if self._threads == 1:
            yield from map(work, items)
            return
        threads = concurrent.futures.ThreadPoolExecutor(self._threads, "router-replay-env")
        try:
            yield from threads.map(work, items)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error, nobody waits for the other episodes

    def _first_requests(self) -> list[Request]:
        """Return one request per group: its episodes share a prompt, so the engine computes it once."""
        return [self._request(episode, 0, n=self._config.group) for episode in self.episodes[:: self._config.group]]

    def _request(self, episode: Episode, turn: int, n: int = 1) -> Request:
        return self._player.request(episode, seed_of(*self._seed, episode.number, turn), n)

    def _append(self, episode: Episode, prompt: Sequence[int], completion: Completion) -> None:
        if completion.finish_reason == "abort":
            raise EngineError(f"{completion.request_id}: the engine aborted a request that the trainer did not abort")
        self._player.append(episode, prompt, completion)


def as_answered(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[int, list[Completion]]]:
    """Send all `requests`, and yield the samples of each with its number, in the order in which they are answered."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        numbers = {loop.create_task(_submit(engine, request)): number for number, request in enumerate(requests)}
        try:
            while numbers:
                done, _ = runner.run(_first_of(numbers))
                for task in done:
                    yield numbers.pop(task), task.result()
        finally:
            for task in numbers:
                task.cancel()


async def _submit(engine: Engine, request: Request) -> list[Completion]:
    return await engine.submit(request)


async def _first_of(tasks: Iterable[asyncio.Task[T]]) -> tuple[set[asyncio.Task[T]], set[asyncio.Task[T]]]:
    return await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
