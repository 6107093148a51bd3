"""Measure the asynchronous loop itself, with engines and a trainer that only take (virtual) time.

    python -m bench.async_loop
    python -m bench.async_loop --engines 100

The loop is the real one: environments, requests, the pool of engines, trajectories, versions, journal, staleness and
weight changes. Lengths are long-tailed: most answers are short, some take ten times the mean. The trainer takes as long
for a step as the engines need for its tokens when all their slots are busy, so neither is slower than the other.

Goals: the loop's own CPU time per episode is at most 1 ms and does not grow with the number in flight; the asynchronous
run takes at most 0.6 of the synchronous one, also of one without a tail; engines are idle at most 5 % of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import gc
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.virtual_engines import LONGEST, PROMPT, AtOnce, TimedEngine, TimedPool, VirtualLoop
from router_replay.engines.types import InFlight
from router_replay.rl.config import AsynchronousConfig, EngineConfig, RolloutConfig, TrainConfig
from router_replay.rl.environments.base import Environment, Task, Turn
from router_replay.rl.loop.garbage import FULL_EVERY, full_collections_between_steps
from router_replay.rl.rollout import Rollout
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state.journal import Journal

SHARE_LIMIT, CPU_LIMIT, IDLE_LIMIT, GROWTH_LIMIT = 0.6, 1e-3, 0.05, 1.5
GROUP, SLOTS, PER_ENGINE, TICK = 8, 16, 100, 1.0  # PER_ENGINE: episodes in flight for each engine
ENDED = ("episodes/trained", "episodes/dropped")
WARM_UP = 8  # steps until as many answers of each length are in progress as later on
STEP = 48  # episodes of a step for each engine: three rounds of its slots


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
        return tuple(range(1, PROMPT + 1))

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Return a reward."""
        return Turn(1.0)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Hold what one size of the bench measured. Times are virtual, except for `cpu` and `searches` (of an episode)."""

    engines: int
    in_flight: float
    cpu: float
    cpu_median: float
    searches: float
    share: float
    share_without_tail: float
    idle: float
    slots_idle: float
    dropped: float


def config_of(engines: int, staleness: int, oversample: float) -> TrainConfig:
    """Return the settings of an asynchronous run."""
    return TrainConfig(
        loop="async",
        rollout=RolloutConfig(prompts=engines * STEP // GROUP, group=GROUP, max_tokens=LONGEST, max_turns=1),
        engine=EngineConfig(max_length=LONGEST + 8),
        asynchronous=AsynchronousConfig.model_validate(
            {"max_staleness": staleness, "oversample": oversample, "max_in_flight": engines * PER_ENGINE}
        ),
    )


def pool_of(engines: int, lengths: np.ndarray) -> TimedPool:
    """Return a pool of engines that only take time."""
    every = {f"engine{number}": TimedEngine(SLOTS, TICK, lengths, GROUP) for number in range(engines)}
    return TimedPool(every, health_seconds=3600.0)


def synchronous(config: TrainConfig, pool: TimedPool, steps: int) -> float:
    """Return the virtual seconds of the rollouts of so many steps."""
    for step in range(steps):
        problems = range(config.rollout.prompts)
        Rollout(pool, TimedTask(), problems, config.rollout, max_length=LONGEST + 8, seed=(0, step)).run()
    return pool.seconds / steps


def asynchronous(config: TrainConfig, pool: TimedPool, steps: int, train: float) -> dict[str, float]:
    """Run so many steps after those that fill the engines; return the figures of these steps."""
    engines = [member.engine for member in pool._members]
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(pathlib.Path(folder))
        stream = RolloutStream(pool, TimedTask(), config, journal, StreamState(Ledger(), 0), version=0)
        stream._pool.shutdown()
        stream._pool = stream._rollouts._pool = AtOnce()  # type: ignore[assignment]
        loop = stream._loop = VirtualLoop()
        loop.outside = 1
        stream.begin_journal(0)
        with stream, full_collections_between_steps() as collect:
            in_flight, costs, searches = list[float](), list[float](), list[float]()
            spent_before, ended_before = 0.0, 0.0
            for version in range(WARM_UP + steps):
                stream._call(loop.asleep(stream._rollouts.take(version)))
                in_flight.append(stream.figures()["episodes/playing"])
                stream._call(loop.asleep(asyncio.sleep(train)))
                stream.new_weights(version + 1, functools.partial(swap, pool, version + 1))
                now = stream.figures()
                searched_from = time.process_time()
                collect()
                spent, ended = time.process_time(), sum(now[name] for name in now if name.startswith(ENDED))
                if version == WARM_UP - 1:
                    before, started, figures = used(engines), loop.now, now
                elif version >= WARM_UP:
                    episodes = max(1.0, ended - ended_before)
                    costs.append((searched_from - spent_before) / episodes)
                    searches.append((spent - searched_from) / episodes)
                spent_before, ended_before = spent, ended
            seconds, used_after = loop.now - started, used(engines)
            loop.outside = 0
    busy, slots = (used_after - before) / seconds / len(engines)
    return {
        # Other work on the machine only makes a step dearer. Of the searches for garbage, one in four is a full one.
        "cpu": min(costs) + float(np.mean(searches)),
        "cpu_median": float(np.median(costs) + np.mean(searches)),
        "searches": float(np.mean(searches)),
        "seconds": seconds / steps,
        "idle": 1 - busy,
        "slots_idle": 1 - slots / SLOTS,
        "in_flight": float(np.mean(in_flight[WARM_UP:])),
        "dropped": (now["episodes/dropped_stale"] - figures["episodes/dropped_stale"])
        / max(1.0, now["episodes/admitted"] - figures["episodes/admitted"]),
    }


def used(engines: Sequence[Any]) -> np.ndarray:
    """Return the seconds with a sample in progress, and the seconds of all slots, summed over the engines."""
    return np.array([engine.figures() for engine in engines]).sum(axis=0)


def swap(pool: TimedPool, version: int, in_flight: InFlight) -> None:
    """Give the engines the weights of `version`."""
    pool.update_weights({}, version, in_flight)


def measure(engines: int, steps: int, staleness: int, oversample: float) -> Figures:
    """Run both loops on so many engines."""
    random = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, 4 + random.pareto(1.5, 1 << 20) * 20).astype(int)
    config = config_of(engines, staleness, oversample)
    train = float(lengths.mean()) * TICK * STEP / SLOTS  # what the engines need for a step with all slots busy
    with pool_of(engines, lengths) as pool:
        rollout = synchronous(config, pool, 2)
    gc.collect()
    with pool_of(engines, lengths) as pool:
        found = asynchronous(config, pool, steps, train)
    seconds = found.pop("seconds")
    return Figures(engines, share=seconds / (rollout + train), share_without_tail=seconds / (2 * train), **found)


def main() -> int:
    """Print the figures with their goals; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="*", default=[100, 1_000])
    parser.add_argument("--steps", type=int, default=FULL_EVERY, help="a multiple of 4 has its share of full searches")
    parser.add_argument("--staleness", type=int, default=6, help="asynchronous.max_staleness")
    parser.add_argument("--oversample", type=float, default=1.0, help="asynchronous.oversample")
    arguments = parser.parse_args()
    print(f"{SLOTS} slots per engine, steps of {STEP} episodes per engine in groups of {GROUP}, lengths 4 to {LONGEST}")
    missed, costs = [], []
    for engines in arguments.engines:
        one = measure(engines, arguments.steps, arguments.staleness, arguments.oversample)
        costs.append(one.cpu)
        print(f"{engines:,} engines, {one.in_flight:,.0f} episodes in flight", flush=True)
        rows = [
            (f"CPU of the loop per episode, ms (median {one.cpu_median * 1e3:.2f})", one.cpu * 1e3, CPU_LIMIT * 1e3),
            ("asynchronous time / synchronous time", one.share, SHARE_LIMIT),
            ("asynchronous time / (rollout without tail + training)", one.share_without_tail, SHARE_LIMIT),
            ("engines idle", one.idle, IDLE_LIMIT),
        ]
        if len(costs) > 1:
            rows.append(("CPU per episode / that of the first size", costs[-1] / costs[0], GROWTH_LIMIT))
        for name, value, limit in rows:
            verdict = "within" if value <= limit else "MISSED"
            print(f"  {name:<55} {value:8.3f}   goal {limit:g}   {verdict}")
            missed += [name] if value > limit else []
        print(f"  {'of the CPU, searches for garbage between steps, ms':<55} {one.searches * 1e3:8.3f}")
        print(f"  {'slots idle':<55} {one.slots_idle:8.3f}\n  {'episodes dropped as too old':<55} {one.dropped:8.3f}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
