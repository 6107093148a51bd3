"""Play episodes without an end, each in a task of its own, beside a trainer that takes finished groups from them.

    with RolloutStream(engine, task, config, journal, state, finished, version=0) as stream:
        groups = stream.take(version=0)          # waits until a step's groups are ready
        ...                                      # train; episodes go on meanwhile
        stream.new_weights(1, load)              # cancels what will be too old, then calls load(in_flight)

All tasks and all state live on one event loop in one thread. Environments, which may block, run in a pool of threads.
The methods without an underscore are for the trainer's thread.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Self, TypeVar, cast

import numpy as np

from router_replay.engines.base import Engine
from router_replay.engines.types import InFlight, Request
from router_replay.errors import EngineError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.environments.base import EnvironmentLost, Task
from router_replay.rl.rollout.ledger import Ledger, OpenGroup, Reason, StreamState
from router_replay.rl.rollout.player import Episode, Keep, Player, seed_of
from router_replay.rl.rollout.staleness import Load, make_policy
from router_replay.rl.state.journal import Journal

T = TypeVar("T")
logger = logging.getLogger(__name__)
FLAT_STEPS = 50  # a run ends after so many steps' worth of groups without signal in a row


@dataclasses.dataclass(eq=False)
class Play:
    """Hold what the stream knows of an episode in progress."""

    oldest: int | None = None
    """The lowest version that its tokens can have; None before its first request."""
    request: str | None = None
    """The id of the request that the engine is answering."""


@dataclasses.dataclass(eq=False)
class Group:
    """Hold the episodes of one problem. It is ready when all `size` of them are in `members`."""

    number: int
    problem: int
    size: int
    members: dict[int, Episode] = dataclasses.field(default_factory=dict)
    playing: dict[int, Play] = dataclasses.field(default_factory=dict)
    prompt: tuple[int, ...] | None = None
    dropped: bool = False
    ready_at: float = 0.0
    finished_oldest: int | None = None

    @property
    def oldest(self) -> int | None:
        """Return the lowest version that its tokens have or can have; None if nothing of it was requested yet."""
        known = [play.oldest for play in self.playing.values()] + [self.finished_oldest]
        return min((version for version in known if version is not None), default=None)

    @property
    def is_complete(self) -> bool:
        """Return whether all episodes have finished."""
        return len(self.members) == self.size

    def finish(self, member: int, episode: Episode) -> None:
        """Take a finished episode."""
        self.playing.pop(member, None)
        self.members[member] = episode
        versions = episode.versions
        if len(versions):
            lowest = int(versions.min())
            self.finished_oldest = lowest if self.finished_oldest is None else min(self.finished_oldest, lowest)


class RolloutStream:
    """Play groups of episodes from the problems of `task` until it is closed.

    `state` and `finished` come from the checkpoint and its journal. `version` is the engine's. `on_turn` is called
    after each turn. `keep` puts the rows of finished episodes away. If a task fails, `take` raises its error.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        config: TrainConfig,
        journal: Journal,
        state: StreamState,
        finished: Sequence[tuple[int, int, Episode]] = (),
        *,
        version: int,
        on_turn: Callable[[], object] = lambda: None,
        keep: Keep | None = None,
    ) -> None:
        self._engine, self._task, self._settings = engine, task, config.asynchronous
        self._batch, self._size = config.rollout.prompts, config.rollout.group
        self._seed, self._on_turn, self._journal = config.seed, on_turn, journal
        self._player = Player(engine, task, config.rollout, config.max_length, keep)
        self._policy = make_policy(self._settings.staleness, self._settings.max_staleness, self._batch)
        self._version, self._epoch = version, 0
        self.ledger = dataclasses.replace(state.ledger, dropped={**Ledger().dropped, **state.ledger.dropped})
        self._next = state.next_group
        self._ready: list[Group] = []
        self._taken: list[Group] = []
        self._running: dict[int, Group] = {}
        self._again: collections.deque[Group] = collections.deque()  # groups of an earlier process, to be played on
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._stopped = False
        self._flat = self._lost = 0  # groups without signal in a row; groups whose environment was lost, in a row
        self._wasted = self._resumed = self._submitted = 0
        self._idle, self._idle_since = 0.0, time.perf_counter()
        self._figures_at, self._environment_seconds = self._idle_since, 0.0
        self._taken_at, self._queue_seconds = self._idle_since, list[float]()
        self._gate, self._news = asyncio.Event(), asyncio.Event()  # requests wait at the gate while weights change
        self._gate.set()
        self._read_back(state, finished)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._settings.environment_threads, "router-replay-env")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="router-replay-rollouts", daemon=True)

    # -- the trainer's thread ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, version: int) -> list[Episode]:
        """Wait until the groups for the update of `version` are ready, and return their episodes."""
        return self._call(self._take(version))

    def new_weights(self, version: int, load: Callable[[InFlight], None]) -> None:
        """Count the groups that were taken as trained, and give the engine the weights of `version` by `load`.

        What will be too old is cancelled before that. `load` gets what to do with the requests in flight.
        """
        cancelled = self._call(self._before_weights(version))
        if cancelled:
            self._engine.abort(cancelled)
        load("keep" if self._settings.on_new_weights == "keep" else "abort")
        self._call(self._after_weights(version))

    def snapshot(self, step: int) -> StreamState:
        """Start the journal's segment of `step`, and return the state for its checkpoint."""
        return self._call(self._snapshot(step))

    def begin_journal(self, step: int) -> None:
        """Start the journal again from the checkpoint of `step`, before `__enter__`."""
        self._begin_journal(step)
        self._journal.forget_after(step)

    def prune_journal(self, oldest: int) -> None:
        """Remove what no checkpoint from step `oldest` on needs."""
        self._journal.prune(oldest)

    def figures(self) -> dict[str, float]:
        """Return the metrics of the stream since the last call; counts of episodes are those of the whole run."""
        return self._call(self._figures())

    def stop(self) -> None:
        """Cancel all episodes in progress. Finished ones stay in the journal; unfinished ones are counted as dropped.

        A resumed run plays the groups of both to their end.
        """
        if not self._stopped:
            self._call(self._stop())

    def close(self) -> None:
        """Stop, and end the thread."""
        if self._thread.is_alive():
            self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._journal.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # -- start and end ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        self._fill()

    async def _stop(self) -> None:
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for group in self._running.values():
            self.ledger.drop("interrupted", len(group.playing))
            group.playing.clear()

    def _read_back(self, state: StreamState, finished: Iterable[tuple[int, int, Episode]]) -> None:
        """Take over what an earlier process left: finished groups are ready, others are played to their end.

        A group that is neither open in the checkpoint nor newer than it was trained or dropped there.
        """
        alive = {group.number: group.alive for group in state.open}
        groups = {group.number: self._group(group.number, group.size) for group in state.open}
        for member, size, episode in finished:
            if episode.group in groups or episode.group >= state.next_group:
                group = groups.setdefault(episode.group, self._group(episode.group, size))
                group.finish(member, episode)
        self._next = max([state.next_group, *(number + 1 for number in groups)])
        for number in range(state.next_group, self._next):  # admitted after the checkpoint, and not finished
            groups.setdefault(number, self._group(number, self._size))
        for number in sorted(groups):
            group = groups[number]
            lost = alive.get(number, 0) - len(group.members)
            if lost > 0:
                self.ledger.drop("interrupted", lost)
            else:
                self.ledger.admitted -= lost
            if group.is_complete:
                self._accept(group)
            else:
                self._again.append(group)

    def _begin_journal(self, step: int) -> list[Group]:
        groups = [*self._taken, *self._ready, *self._running.values(), *self._again]
        kept = [(member, group.size, episode) for group in groups for member, episode in group.members.items()]
        self._journal.begin(step, kept)
        return groups

    async def _snapshot(self, step: int) -> StreamState:
        groups = self._begin_journal(step)
        opened = [OpenGroup(group.number, group.size, len(group.members) + len(group.playing)) for group in groups]
        ledger = dataclasses.replace(self.ledger, dropped=dict(self.ledger.dropped))
        return StreamState(ledger, self._next, tuple(sorted(opened, key=lambda group: group.number)))

    # -- admission --------------------------------------------------------------------------------

    def _group(self, number: int, size: int) -> Group:
        return Group(number, number % self._task.problems if self._task.problems else number, size)

    def _fill(self) -> None:
        """Start groups while the policy and the limits admit them."""
        while not self._stopped and self._failure is None and self._admits():
            if self._again:
                group = self._again.popleft()
            else:
                group, self._next = self._group(self._next, self._size), self._next + 1
            self._running[group.number] = group
            for member in range(group.size):
                if member not in group.members:
                    group.playing[member] = Play()
                    task = self._loop.create_task(self._play(group, member))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            self.ledger.admitted += len(group.playing)

    def _admits(self) -> bool:
        settings = self._settings
        if settings.max_in_flight and self._tasks and len(self._tasks) + self._size > settings.max_in_flight:
            return False
        if settings.max_ready and len(self._ready) >= settings.max_ready:
            return False
        extra = int((settings.oversample - 1) * self._batch)
        waiting, running = len(self._ready) + len(self._taken), max(0, len(self._running) - extra)
        return self._policy.admit(Load(self._version, waiting, running))

    # -- one episode ------------------------------------------------------------------------------

    async def _play(self, group: Group, member: int) -> None:
        try:
            episode = await self._played(group, member)
        except asyncio.CancelledError:
            raise
        except EnvironmentLost as error:
            self._without_environment(group, error)
        except BaseException as error:
            self._fail(error)
        else:
            if not group.dropped:
                self._journal_it(group, member, episode)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.discard(task)
            self._fill()

    async def _played(self, group: Group, member: int) -> Episode:
        episode = await self._in_pool(self._player.reset, member, group.number, group.problem)
        group.prompt = episode.prompt if group.prompt is None else group.prompt
        self._player.refuse_other_prompt(episode, group.prompt)
        for turn in range(self._player.turns):
            if episode.done or group.dropped or not self._player.room(episode):
                break
            prompt, tokens = episode.prompt, await self._answer(group, member, episode, turn)
            self._on_turn()
            if not group.dropped:
                await self._in_pool(self._player.step, episode, prompt, tokens)
        if group.dropped:
            self._wasted += episode.sampled_tokens
        else:
            await self._in_pool(self._player.put_away, episode)
        return episode

    async def _answer(self, group: Group, member: int, episode: Episode, turn: int) -> list[int]:
        """Return the tokens of a turn. An answer that new weights interrupted is continued."""
        tokens: list[int] = []
        play = group.playing.get(member, Play())
        for attempt in range(1 << 30):
            await self._gate.wait()
            if group.dropped:
                break
            if play.oldest is None:
                play.oldest = self._version
            seed = seed_of(self._seed, group.number, member, turn, attempt)
            forced = self._settings.on_new_weights == "resume" and self._rows_are_older(episode)
            request = self._player.request(episode, seed, more=tokens, forced=forced)
            epoch, play.request = self._epoch, request.id
            try:
                [completion] = await self._submit(request)
            finally:
                play.request = None
            self._player.append(episode, request.token_ids, completion)
            tokens += completion.token_ids.tolist()
            if completion.finish_reason != "abort" or len(tokens) >= self._player.room(episode):
                break
            if epoch == self._epoch:
                raise EngineError(f"{request.id}: the engine aborted a request that the trainer did not abort")
            if not group.dropped:
                self._resumed += len(completion.token_ids)
            if not episode.sampled_tokens:  # nothing was sampled by the old weights
                play.oldest = None
        return tokens

    def _rows_are_older(self, episode: Episode) -> bool:
        """Return whether a sampled token of the episode is of another version than the engine's."""
        versions = episode.versions
        return bool(len(versions)) and bool((versions != self._version).any())

    async def _submit(self, request: Request) -> Any:
        if not self._submitted:
            self._idle += time.perf_counter() - self._idle_since
        self._submitted += 1
        try:
            return await self._engine.submit(request)
        finally:
            self._submitted -= 1
            if not self._submitted:
                self._idle_since = time.perf_counter()

    async def _in_pool(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._pool, work, *arguments)

    # -- finished groups --------------------------------------------------------------------------

    def _journal_it(self, group: Group, member: int, episode: Episode) -> None:
        try:
            self._journal.add(episode, member, group.size)
        except BaseException as error:
            self._fail(error)
            return
        episode.environment = None
        group.finish(member, episode)
        if group.is_complete:
            del self._running[group.number]
            self._accept(group)

    def _accept(self, group: Group) -> None:
        """Let a complete group wait for the trainer, unless nothing can be learned from it or it is too old."""
        rewards = {episode.reward for episode in group.members.values()}
        flat = self._settings.drop_without_signal and len(rewards) == 1
        self._flat = self._flat + 1 if flat else 0
        if flat:
            self._drop(group, "no_signal")
            if self._flat >= FLAT_STEPS * self._batch:
                self._fail(
                    TrainError(
                        f"the last {self._flat} groups had equal rewards in each group, and "
                        "asynchronous.drop_without_signal drops such groups: use other problems or another reward, or "
                        "set it to false"
                    )
                )
        elif self._policy.evict([group], self._version):
            self._drop(group, "stale")
        else:
            self._lost = 0
            group.ready_at = time.perf_counter()
            self._ready.append(group)
            self._news.set()

    def _without_environment(self, group: Group, error: EnvironmentLost) -> None:
        """Drop a group of which an environment was lost with its process. If all are lost, that is the error."""
        logger.warning("%s; its group is dropped", error)
        if not group.dropped:
            self._drop(group, "environment")
        self._lost += 1
        if self._lost >= FLAT_STEPS * self._batch:
            self._fail(error)

    def _drop(self, group: Group, reason: Reason) -> None:
        group.dropped = True
        self._running.pop(group.number, None)
        self.ledger.drop(reason, len(group.members) + len(group.playing))
        self._wasted += sum(episode.sampled_tokens for episode in group.members.values())

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._news.set()

    async def _take(self, version: int) -> list[Episode]:
        while True:
            if self._failure is not None:
                raise self._failure
            chosen = cast(list[Group], self._policy.select(self._ready, version))
            if chosen:
                break
            self._fill()
            if not self._tasks:
                raise TrainError(
                    f"the trainer waits for {self._batch} groups, {len(self._ready)} are ready, none is in progress, "
                    f"and asynchronous.staleness = {self._settings.staleness!r} admits no other: its methods admit and "
                    "select must let a step's groups in"
                )
            self._news.clear()
            await self._news.wait()
        self._taken = chosen
        self._ready = [group for group in self._ready if group not in chosen]
        self._taken_at = time.perf_counter()
        episodes = [group.members[member] for group in chosen for member in sorted(group.members)]
        for number, episode in enumerate(episodes):
            episode.number = number
        self._fill()
        return episodes

    # -- new weights ------------------------------------------------------------------------------

    async def _before_weights(self, version: int) -> list[str]:
        """Count what was trained, drop what will be too old, and return the requests to cancel."""
        self._gate.clear()
        self._epoch += 1
        self._queue_seconds = [self._taken_at - group.ready_at for group in self._taken]
        self.ledger.trained += sum(group.size for group in self._taken)
        self._taken = []
        for group in cast(list[Group], self._policy.evict(self._ready, version)):
            self._ready.remove(group)
            self._drop(group, "stale")
        too_old = cast(list[Group], self._policy.abort(list(self._running.values()), version))
        for group in too_old:
            self._drop(group, "stale")
        return [play.request for group in too_old for play in group.playing.values() if play.request is not None]

    async def _after_weights(self, version: int) -> None:
        self._version = version
        self._gate.set()
        self._fill()

    # -- figures ----------------------------------------------------------------------------------

    async def _figures(self) -> dict[str, float]:
        now = time.perf_counter()
        idle = self._idle + (0.0 if self._submitted else now - self._idle_since)
        seconds = self._player.seconds_in_environments
        playing = sum(len(group.playing) for group in self._running.values())
        values = {
            "async/engine_idle": min(1.0, idle / max(1e-9, now - self._figures_at)),
            "async/queue_seconds": float(np.mean(self._queue_seconds)) if self._queue_seconds else 0.0,
            "async/tokens_wasted": self._wasted,
            "async/tokens_resumed": self._resumed,
            "async/ready": len(self._ready),
            "episodes/admitted": self.ledger.admitted,
            "episodes/trained": self.ledger.trained,
            **{f"episodes/dropped_{reason}": count for reason, count in self.ledger.dropped.items()},
            "episodes/saved": self.ledger.open() - playing,
            "episodes/playing": playing,
            "seconds/reward": seconds - self._environment_seconds,
        }
        self._wasted = self._resumed = 0
        self._idle, self._idle_since, self._figures_at = 0.0, now, now
        self._environment_seconds = seconds
        return values


def version_figures(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """Return the metrics of a step that depend on the ages of its tokens, for an update of `version`."""
    ages = version - np.concatenate([episode.versions for episode in episodes])
    spans = [
        len(np.unique(np.asarray(one.versions)[one.loss_mask]))
        for episode in episodes
        for one in episode.trajectories
        if one.loss_mask.any()
    ]
    return {
        "async/staleness_mean": float(ages.mean()),
        "async/staleness_max": float(ages.max()),
        "async/versions_per_sample": float(np.mean(spans)),
    }
