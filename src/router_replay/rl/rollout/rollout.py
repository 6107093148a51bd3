"""Play the episodes of a step: environments ask, the engine answers, and the answers are stitched into trajectories.

    rollout = Rollout(engine, task, problems=range(8), config=config.rollout, max_length=512, seed=(0, step))
    episodes = rollout.run()

All episodes take their turns together, with one batch of requests per turn, so the same seeds give the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request
from router_replay.errors import EngineError
from router_replay.rl.config import RolloutConfig
from router_replay.rl.environments.base import Task
from router_replay.rl.rollout.player import Episode, Player, seed_of

S = TypeVar("S")
T = TypeVar("T")


class Rollout:
    """Play the episodes of one training step. If `run` raises, `episodes` holds what was played until then.

    `problems` are the problem numbers, each of which gets `config.group` episodes. `max_length` limits prompt and
    completion together. `seed` decides all samples of the step. `on_turn` is called before each turn.
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
    ) -> None:
        self._engine, self._config = engine, config
        self._player = Player(engine, task, config, max_length)
        self._seed, self._on_turn = seed, on_turn
        self._threads = getattr(task, "threads", 1)
        self.episodes: list[Episode] = []
        wanted = [(group, problem) for group, problem in enumerate(problems) for _ in range(config.group)]
        numbered = [(number, *one) for number, one in enumerate(wanted)]
        for episode in self._together(lambda one: self._player.reset(*one), numbered):
            if self.episodes and self.episodes[-1].group == episode.group:
                self._player.refuse_other_prompt(episode, self.episodes[-1].prompt)
            self.episodes.append(episode)

    @property
    def seconds_in_environments(self) -> float:
        """Return the time that the environments took so far."""
        return self._player.seconds_in_environments

    def run(self) -> list[Episode]:
        """Play all episodes to their end."""
        for turn in range(self._player.turns):
            waiting = [episode for episode in self.episodes if not episode.done and self._player.room(episode)]
            if not waiting:
                break
            self._on_turn()
            requests = self._first_requests() if turn == 0 else [self._request(e, turn) for e in waiting]
            completions = self._engine.generate(requests)
            if len(completions) != len(waiting):
                raise EngineError(f"expected {len(waiting)} completions, one per episode, got {len(completions)}")
            prompts = [request.token_ids for request in requests for _ in range(request.sampling.n)]
            turns = list(zip(waiting, prompts, completions, strict=True))
            for turn_of in turns:  # append all completions first, so that they are kept if an environment raises
                self._append(*turn_of)
            list(self._together(lambda turn: self._player.step(turn[0], turn[1], turn[2].token_ids.tolist()), turns))
        return self.episodes

    def _together(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
        """Yield the results of `work` in order; several items are worked on at once if the task has threads."""
        if self._threads == 1:
            yield from map(work, items)
            return
        threads = ThreadPoolExecutor(self._threads, "router-replay-env")
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
