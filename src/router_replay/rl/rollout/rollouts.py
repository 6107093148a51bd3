"""Play groups of episodes, each episode in a task of its own, and hold all that is known of them.

Everything here runs on one event loop in one thread. `stream.py` calls it from the trainer's thread. Environments,
which may block, run in a pool of threads.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request
from router_replay.errors import EngineError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.environments.base import EnvironmentLost, Task
from router_replay.rl.rollout.evaluation import Evaluation, EvaluationResult, result_of
from router_replay.rl.rollout.groups import Group, Play
from router_replay.rl.rollout.ledger import Ledger, OpenGroup, Reason, StreamState
from router_replay.rl.rollout.order import TRAINER, Order
from router_replay.rl.rollout.player import Episode, Keep, Player, seed_of
from router_replay.rl.rollout.staleness import Load, make_policy
from router_replay.rl.rollout.stream_figures import StreamFigures
from router_replay.rl.state.journal import Journal

T = TypeVar("T")
logger = logging.getLogger(__name__)
FLAT_STEPS = 50  # a run ends after so many steps' worth of groups without signal in a row


class Rollouts:
    """Play groups of episodes from the problems of `task`. The arguments are those of `RolloutStream`.

    `pool` runs the environments.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        config: TrainConfig,
        journal: Journal,
        state: StreamState,
        finished: Sequence[tuple[int, int, Episode]],
        *,
        version: int,
        on_turn: Callable[[], object],
        order: Order,
        pool: concurrent.futures.Executor,
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
        self._figures, self._taken_at = StreamFigures(), time.perf_counter()
        self._evaluation: asyncio.Task[EvaluationResult] | None = None
        self._order, self._pool = order, pool
        self._news = asyncio.Event()
        self._gate, self._second_gate = asyncio.Event(), asyncio.Event()  # requests wait while weights change
        self._gate.set()
        self._second_gate.set()
        self._read_back(state, finished)

    # -- start and end ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first groups."""
        await self._order.turn(TRAINER)
        self._order.did("start", admit=self._fill())

    async def stop(self) -> None:
        """Cancel all episodes in progress, and count them as interrupted."""
        self._stopped = True
        self._order.end()
        tasks = [*self._tasks, *([self._evaluation] if self._evaluation else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()  # those that were cancelled before they began
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

    def begin_journal(self, step: int) -> list[Group]:
        """Start the journal's segment of `step`, and return the groups that are open."""
        groups = [*self._taken, *self._ready, *self._running.values(), *self._again]
        kept = [(member, group.size, episode) for group in groups for member, episode in group.members.items()]
        self._journal.begin(step, kept)
        return groups

    async def snapshot(self, step: int) -> StreamState:
        """Start the journal's segment of `step`, and return the state for its checkpoint."""
        groups = self.begin_journal(step)
        opened = [OpenGroup(group.number, group.size, len(group.members) + len(group.playing)) for group in groups]
        ledger = dataclasses.replace(self.ledger, dropped=dict(self.ledger.dropped))
        return StreamState(ledger, self._next, tuple(sorted(opened, key=lambda group: group.number)))

    # -- admission --------------------------------------------------------------------------------

    def _group(self, number: int, size: int) -> Group:
        return Group(number, number % self._task.problems if self._task.problems else number, size)

    def _fill(self) -> list[int]:
        """Start groups while the policy and the limits admit them, and return their numbers."""
        admitted: list[int] = []
        while not self._stopped and self._failure is None and self._admits():
            if self._again:
                group = self._again.popleft()
            else:
                group, self._next = self._group(self._next, self._size), self._next + 1
            self._running[group.number] = group
            for member in range(group.size):
                if member not in group.members:
                    group.playing[member] = Play()
                    task = asyncio.get_running_loop().create_task(self._play(group, member))
                    self._tasks.add(task)  # `_play` takes it out at its end
            self.ledger.admitted += len(group.playing)
            admitted.append(group.number)
        return admitted

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
        task, name = asyncio.current_task(), f"{group.number}.{member}"
        assert task is not None
        try:
            try:
                episode = await self._played(group, member)
            except EnvironmentLost as error:
                self._without_environment(group, error)
                self._tasks.discard(task)
                self._order.did("lost", episode=name, admit=self._fill())
                return
            await self._order.turn(name)
            if not group.dropped:
                self._journal_it(group, member, episode)
            self._tasks.discard(task)
            admitted = self._fill()
            if self._order.notes:
                reward = float(episode.reward)
                self._order.did("end", episode=name, reward=reward, dropped=group.dropped, admit=admitted)
        except asyncio.CancelledError:
            self._tasks.discard(task)
            raise
        except BaseException as error:
            self._tasks.discard(task)
            self._fail(error)

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
            self._figures.wasted += episode.sampled_tokens
        elif self._player.puts_away:
            await self._in_pool(self._player.put_away, episode)
        return episode

    async def _answer(self, group: Group, member: int, episode: Episode, turn: int) -> list[int]:
        """Return the tokens of a turn. An answer that new weights interrupted is continued."""
        tokens: list[int] = []
        play = group.playing.get(member, Play())
        order, name = self._order, f"{group.number}.{member}"
        sampled_by = set(episode.versions.tolist())  # the versions of all sampled tokens of the episode
        request: Request | None = None
        for attempt in range(1 << 30):
            await (self._gate if sampled_by else self._second_gate).wait()
            await order.turn(name)
            if group.dropped:
                break
            if play.oldest is None:
                play.oldest = self._version
            id = f"{name}.{turn}.{attempt}"
            if request is not None and not sampled_by:  # it was aborted in the engine's queue and is sent again
                request = Request(request.token_ids, request.sampling, id=id)
            else:
                seed = seed_of(self._seed, group.number, member, turn, attempt)
                forced = self._settings.on_new_weights == "resume" and bool(sampled_by - {self._version})
                request = self._player.request(episode, seed, more=tokens, forced=forced, id=id)
            epoch, play.request = self._epoch, request.id
            order.did("submit", request=request.id, version=self._version)
            [completion] = await self._submit(request)
            await order.turn(name)
            play.request = None
            if order.notes:
                order.did("answer", request=request.id, **_facts_of(completion))
            # A request that was aborted in the engine's queue adds nothing.
            if len(completion.token_ids) or completion.finish_reason != "abort":
                self._player.append(episode, request.token_ids, completion)
                tokens += completion.token_ids.tolist()
                sampled_by.update(completion.versions.tolist())
            if completion.finish_reason != "abort" or len(tokens) >= self._player.room(episode):
                break
            if epoch == self._epoch:
                raise EngineError(f"{request.id}: the engine aborted a request that the trainer did not abort")
            if not group.dropped:
                self._figures.resumed += len(completion.token_ids)
            if not sampled_by:  # nothing was sampled by the old weights
                play.oldest = None
            del completion  # it would lie in memory until the next answer
        return tokens

    async def _submit(self, request: Request) -> list[Completion]:
        self._figures.submitted()
        try:
            return await self._engine.submit(request)
        finally:
            self._figures.answered()

    async def _in_pool(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

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
        self._figures.wasted += sum(episode.sampled_tokens for episode in group.members.values())

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._order.fail(error)
        self._news.set()

    async def take(self, version: int) -> list[Episode]:
        """Wait until the groups for the update of `version` are ready, and return their episodes."""
        while True:
            await self._order.turn(TRAINER)
            if self._failure is not None:
                raise self._failure
            chosen = cast(list[Group], self._policy.select(self._ready, version))
            if chosen:
                break
            if self._order.decides:
                self._order.did("take", version=version, groups=[])  # raises: another step is due
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
        self._ready = _without(self._ready, chosen)
        self._taken_at = time.perf_counter()
        episodes = [group.members[member] for group in chosen for member in sorted(group.members)]
        for number, episode in enumerate(episodes):
            episode.number = number
        admitted = self._fill()
        if self._order.notes:
            self._order.did("take", version=version, groups=[group.number for group in chosen], admit=admitted)
        return episodes

    # -- new weights ------------------------------------------------------------------------------

    async def before_weights(self, version: int) -> list[str]:
        """Count what was trained, drop what will be too old, and return the requests to cancel."""
        if self._evaluation is not None:
            started = time.perf_counter()
            await self._evaluation_ends()
            self._figures.evaluation_waited = time.perf_counter() - started
        await self._order.turn(TRAINER)
        self._gate.clear()
        self._second_gate.clear()
        self._epoch += 1
        self._figures.queue_seconds = [self._taken_at - group.ready_at for group in self._taken]
        self.ledger.trained += sum(group.size for group in self._taken)
        self._taken = []
        evicted = cast(list[Group], self._policy.evict(self._ready, version))
        self._ready = _without(self._ready, evicted)
        for group in evicted:
            self._drop(group, "stale")
        too_old = cast(list[Group], self._policy.abort(list(self._running.values()), version))
        for group in too_old:
            self._drop(group, "stale")
        if self._order.notes:
            self._order.did("cancel", version=version, groups=[group.number for group in (*evicted, *too_old)])
        return [play.request for group in too_old for play in group.playing.values() if play.request is not None]

    async def after_weights(self, version: int) -> None:
        """Let episodes go on with the weights of `version`."""
        await self._order.turn(TRAINER)
        self._version = version
        self._gate.set()
        self._order.did("version", version=version, admit=self._fill())
        # Answers in progress go first: a queue of new ones before them would make them older and leave more half done.
        await asyncio.sleep(0)
        self._second_gate.set()

    # -- evaluation -------------------------------------------------------------------------------

    async def evaluate(self, evaluation: Evaluation) -> None:
        """Begin to play `evaluation` with the current weights."""
        await self._evaluation_ends()
        self._evaluation = asyncio.get_running_loop().create_task(self._evaluation_of(evaluation, self._version))

    async def _evaluation_of(self, evaluation: Evaluation, version: int) -> EvaluationResult:
        started = time.perf_counter()
        episodes = await evaluation.play_beside(self._submit, self._in_pool, version)
        return result_of(episodes, version, time.perf_counter() - started)

    async def _evaluation_ends(self) -> None:
        """Wait for the evaluation in progress. Its error is raised by `evaluated`."""
        if self._evaluation is not None:
            await asyncio.wait([self._evaluation])

    async def evaluated(self) -> EvaluationResult | None:
        """Wait for the evaluation that was begun, and return its result once."""
        await self._evaluation_ends()
        done, self._evaluation = self._evaluation, None
        if done is None:
            return None
        try:
            return done.result()
        except BaseExceptionGroup as errors:  # those of its episodes; the first one ended the others
            raise errors.exceptions[0] from None

    # -- figures ----------------------------------------------------------------------------------

    async def values(self) -> dict[str, float]:
        """Return the metrics since the last call; counts of episodes are those of the whole run."""
        playing = sum(len(group.playing) for group in self._running.values())
        return {
            **self._figures.values(self._player.seconds_in_environments),
            "async/ready": len(self._ready),
            "episodes/admitted": self.ledger.admitted,
            "episodes/trained": self.ledger.trained,
            **{f"episodes/dropped_{reason}": count for reason, count in self.ledger.dropped.items()},
            "episodes/saved": self.ledger.open() - playing,
            "episodes/playing": playing,
        }


def _without(groups: Sequence[Group], others: Sequence[Group]) -> list[Group]:
    """Return the groups that are not among the others. A step may have thousands of each."""
    numbers = {group.number for group in others}
    return [group for group in groups if group.number not in numbers]


def _facts_of(completion: Completion) -> dict[str, Any]:
    """Return what a schedule says of an answer. Its checksum differs if one bit of it does."""
    bits = completion.token_ids.tobytes() + completion.logprobs.tobytes() + completion.versions.tobytes()
    return {"tokens": len(completion.token_ids), "finish": completion.finish_reason, "checksum": zlib.crc32(bits)}
