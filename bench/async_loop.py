"""Measure the asynchronous loop itself, with an engine and a trainer that only take time.

    python -m bench.async_loop

The loop is the real one: environments, requests, trajectories, versions, journal, staleness, weight changes. The engine
has slots that each sample one token per tick; lengths are long-tailed (most answers are short, some take ten times the
mean). The trainer sleeps as long as a synchronous rollout takes. Limits: the asynchronous run takes at most 0.6 of the
synchronous one, and the loop's own CPU time per episode is at most 1 ms, whatever the number in flight is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from router_replay import RouterSpec, Routes
from router_replay.engines.base import Engine
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.rl.config import AsynchronousConfig, EngineConfig, RolloutConfig, TrainConfig
from router_replay.rl.environments.base import Environment, Task, Turn
from router_replay.rl.rollout import Rollout
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state.journal import Journal
from router_replay.runs import Runs

SPEC = RouterSpec(num_experts=128, top_k=8, layers=tuple(range(4)))
LONGEST = 400
SHARE_LIMIT, CPU_LIMIT = 0.6, 1e-3


class TimedEngine(Engine):
    """Answer after the time that the answer's tokens take. At most `slots` answers are sampled at the same time.

    `tick` is the time of one token; 0 answers at once. It stands for an engine with forced routes and partial answers,
    as the weights change.
    """

    spec, vocabulary, version = SPEC, 1000, 0
    capabilities = Capabilities(routes=True, forced_routes=True, start=True, versions=True)

    def __init__(self, slots: int, tick: float, lengths: np.ndarray) -> None:
        self._slots, self._tick, self._lengths = slots, tick, lengths
        self._room: asyncio.Semaphore | None = None
        self._flights: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._rows = np.tile(np.arange(8, dtype=np.uint8), (LONGEST + 8, len(SPEC.layers), 1))

    async def submit(self, request: Request) -> list[Completion]:
        """Wait for a slot, then for the tokens; an abort returns those that there was time for."""
        length = min(int(self._lengths[(request.sampling.seed or 0) % len(self._lengths)]), request.sampling.max_tokens)
        stopped = asyncio.Event()
        self._flights[request.id] = (asyncio.get_running_loop(), stopped)
        try:
            if not self._tick:
                await asyncio.sleep(0)
                return [self._answer(request, length, "length")]
            async with self._semaphore():
                started = time.perf_counter()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), length * self._tick)
                done = int((time.perf_counter() - started) / self._tick)
            if stopped.is_set() and done < length:
                return [self._answer(request, done, "abort")]
            return [self._answer(request, length, "length")]
        finally:
            del self._flights[request.id]

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Answer all samples of all requests, as one batch."""
        self._room = None
        singles = [
            Request(one.token_ids, sampling_of(one, index), one.start)
            for one in requests
            for index in range(one.sampling.n)
        ]

        async def together() -> list[Completion]:
            return [answer for [answer] in await asyncio.gather(*map(self.submit, singles))]

        return asyncio.run(together())

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Stop these requests."""
        for name in list(self._flights) if request_ids is None else request_ids:
            if name in self._flights:
                loop, stopped = self._flights[name]
                loop.call_soon_threadsafe(stopped.set)
        return []

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def update_weights(self, source: Any, version: int, in_flight: InFlight = "abort") -> None:
        """Take the version."""
        if in_flight == "abort":
            self.abort()
        self.version = version

    def close(self) -> None:
        """Do nothing."""

    def _semaphore(self) -> asyncio.Semaphore:
        self._room = self._room or asyncio.Semaphore(self._slots)
        return self._room

    def _answer(self, request: Request, tokens: int, reason: str) -> Completion:
        rows = len(request.token_ids) + tokens - 1 - request.start
        routes = Routes.trusted(self._rows[:rows], SPEC, Runs.constant(True, rows), None) if tokens else None
        return Completion.assemble(
            request, 0, spec=SPEC, token_ids=[1] * tokens, logprobs=[-1.0] * tokens, routes=routes,
            versions=self.version, finish_reason=reason,
        )  # fmt: skip


class TimedTask(Task):
    """One answer per problem."""

    max_turns = 1

    def environment(self) -> Environment:
        """Return an environment of one turn."""
        return TimedEnvironment()


class TimedEnvironment:
    """Give every answer a reward at once."""

    def reset(self, problem: int) -> Sequence[int]:
        """Return a short prompt."""
        return (1, 2, 3)

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Return a reward."""
        return Turn(1.0)


def sampling_of(request: Request, index: int) -> Any:
    """Return the parameters of one sample of a request."""
    seed = request.sampling.seed or 0
    return dataclasses.replace(request.sampling, n=1, seed=seed + index)


def swap(engine: Engine, version: int, in_flight: InFlight) -> None:
    """Give the engine the weights of `version`."""
    engine.update_weights({}, version, in_flight)


def config_of(prompts: int, group: int, **settings: Any) -> TrainConfig:
    """Return the settings of an asynchronous run."""
    return TrainConfig(
        loop="async",
        rollout=RolloutConfig(prompts=prompts, group=group, max_tokens=LONGEST, max_turns=1),
        engine=EngineConfig(max_length=LONGEST + 8),
        asynchronous=AsynchronousConfig.model_validate(settings),
    )


@contextlib.contextmanager
def stream_of(config: TrainConfig, engine: Engine) -> Iterator[RolloutStream]:
    """Open a stream of rollouts with a journal in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(pathlib.Path(folder))
        stream = RolloutStream(engine, TimedTask(), config, journal, StreamState(Ledger(), 0), version=0)
        stream.begin_journal(0)
        with stream:
            yield stream


def synchronous(config: TrainConfig, engine: TimedEngine, steps: int, train: float) -> tuple[float, float]:
    """Return the seconds of all steps, and of their rollouts."""
    started, rollouts = time.perf_counter(), 0.0
    for step in range(steps):
        before = time.perf_counter()
        problems = range(config.rollout.prompts)
        Rollout(engine, TimedTask(), problems, config.rollout, max_length=LONGEST + 8, seed=(0, step)).run()
        rollouts += time.perf_counter() - before
        time.sleep(train)
    return time.perf_counter() - started, rollouts


def asynchronous(config: TrainConfig, engine: TimedEngine, steps: int, train: float) -> tuple[float, dict[str, float]]:
    """Return the seconds of all steps, and the last figures of the stream."""
    started = time.perf_counter()
    idle: list[float] = []
    with stream_of(config, engine) as stream:
        for version in range(steps):
            stream.take(version)
            time.sleep(train)
            stream.new_weights(version + 1, functools.partial(swap, engine, version + 1))
            figures = stream.figures()
            idle.append(figures["async/engine_idle"])
    return time.perf_counter() - started, {**figures, "async/engine_idle": float(np.mean(idle))}


def cpu_per_episode(in_flight: int, rounds: int) -> float:
    """Return the loop's CPU seconds per episode with so many in flight, over all threads of the process."""
    group, engine = 8, TimedEngine(in_flight, 0.0, np.full(1 << 16, 16))
    config = config_of(in_flight // group // 2, group, max_staleness=1)
    gc.collect()
    with stream_of(config, engine) as stream:
        for version in range(rounds):
            stream.take(version)
            if version == 0:  # from here on as many episodes are in the middle at every moment
                first, before = time.process_time(), done(stream)
            stream.new_weights(version + 1, functools.partial(swap, engine, version + 1))
        stream.take(rounds)
        return (time.process_time() - first) / (done(stream) - before)


def done(stream: RolloutStream) -> float:
    """Return how many episodes have finished."""
    figures = stream.figures()
    return figures["episodes/trained"] + figures["episodes/saved"]


def main() -> int:
    """Print both tables; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    arguments = parser.parse_args()
    print("CPU of the loop per episode, rows of 4 layers x 8 experts, 16 tokens")
    costs = {}
    for number in arguments.in_flight:
        costs[number] = cpu_per_episode(number, rounds=max(1, 20_000 // number))
        print(f"  {number:>9,} in flight   {costs[number] * 1e3:.3f} ms")
    random = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, 4 + random.pareto(1.5, 1 << 16) * 20).astype(int)
    prompts, group, slots, tick = 16, 4, 64, 0.002
    config = config_of(prompts, group, max_staleness=2, max_in_flight=2 * slots)
    _, rollouts = synchronous(config, TimedEngine(slots, tick, lengths), 4, 0.0)
    train = rollouts / 4
    whole, _ = synchronous(config, TimedEngine(slots, tick, lengths), arguments.steps, train)
    beside, figures = asynchronous(config, TimedEngine(slots, tick, lengths), arguments.steps, train)
    share = beside / whole
    print(f"{arguments.steps} steps of {prompts} x {group} episodes, {slots} slots, training as long as a rollout")
    print(f"  synchronous    {whole:6.2f} s, of which training {arguments.steps * train:.2f} s")
    print(f"  asynchronous   {beside:6.2f} s, {share:.2f} of it; engine idle {figures['async/engine_idle']:.1%}")
    dropped = figures["episodes/dropped_stale"]
    print(f"  episodes: {figures['episodes/admitted']:.0f} admitted, {figures['episodes/trained']:.0f} trained, "
          f"{dropped:.0f} dropped as too old")  # fmt: skip
    flat = max(costs.values()) <= CPU_LIMIT
    verdict = "within" if share <= SHARE_LIMIT and flat else "ABOVE"
    print(f"{verdict} the limits: {SHARE_LIMIT} of the synchronous time, {CPU_LIMIT * 1e3:.0f} ms per episode")
    return int(verdict == "ABOVE")


if __name__ == "__main__":
    raise SystemExit(main())
