"""Drive a run on Ray: reserve its place, start ranks and engines, and start the ranks again when one of them dies.

The driver does no work of the run. If it dies, Ray ends all actors, and `--resume` continues from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any, Self

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from router_replay.errors import ConfigError, RouterReplayError, TrainError
from router_replay.rl.cluster import environments
from router_replay.rl.cluster.engines import EngineActor
from router_replay.rl.cluster.environments import EnvironmentActor
from router_replay.rl.cluster.ranks import Place, RankActor, end_process, interrupt_process
from router_replay.rl.cluster.routes import POST, PostActor
from router_replay.rl.config import TrainConfig
from router_replay.rl.config.checks import check_config
from router_replay.rl.processes.ranks import world_size
from router_replay.rl.processes.watch import GRACE, HEARD, RankFailed
from router_replay.rl.state.checkpoints import Progress

MESSAGE_SECONDS = 30.0
REQUESTS = 100_000  # that an engine may have at the same time
CLOSING_SECONDS = 20.0


def train_on_ray(config: TrainConfig, resume: bool = False) -> Progress:
    """Train to the end on Ray, or raise. `resume` continues from the newest checkpoint in `config.output`."""
    if world_size() > 1:
        raise ConfigError(
            'cluster.kind = "ray" starts the trainer ranks itself (cluster.ranks): start one process, without torchrun'
        )
    check_config(config, config.cluster.ranks)
    restarts = config.cluster.restarts
    with _connected(config), Cluster(config) as cluster:
        for restart in range(restarts + 1):
            progress, died = cluster.train(resume or restart > 0)
            if progress is not None:
                return progress
            if restart < restarts:
                _say(f"{died}; all ranks start again from the newest checkpoint (restart {restart + 1} of {restarts})")
    raise TrainError(f"{died}, after {restarts} restarts (cluster.restarts); continue with --resume")


class Cluster:
    """Hold the place of a run in a Ray cluster, and its engines. The ranks belong to one call of `train`."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._settings = config, config.cluster
        self._names = [name for name, table in config.all_engines.items() if table.kind not in table.behind_url]
        self._closing = contextlib.ExitStack()
        _refuse_idle_gpus(config)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._closing.close)
            self._group = self._reserve()
            self._engines = [
                self._actor(EngineActor, self._settings.ranks + number, name=name, max_restarts=-1).remote(name)
                for number, name in enumerate(self._names)
            ]
            self._closing.callback(self._close_engines)
            first = self._settings.ranks + len(self._engines)
            for number, name in enumerate(environments.names(config)):
                made = self._actor(EnvironmentActor, first + number, name=name, max_restarts=-1)
                self._closing.callback(ray.kill, made.remote(config, os.getcwd()))
            post = ray.remote(PostActor).options(name=POST, num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
            self._closing.callback(ray.kill, post)
            on_failure.pop_all()

    def train(self, resume: bool) -> tuple[Progress | None, str]:
        """Run all ranks to their end. Return the progress; or None, and which rank died.

        `resume` continues from the newest checkpoint. An error that a rank raised is raised here.
        """
        world = self._settings.ranks
        ranks = [self._actor(RankActor, rank).remote(rank, world) for rank in range(world)]
        places: list[Place] = _get([rank.place.remote() for rank in ranks], "the trainer ranks", self._settings)
        folder = os.getcwd()
        answers = [rank.train.remote(self._config, resume, places[0], folder) for rank in ranks]
        try:
            with _stopping(places):
                results = _results(answers, ranks)
        finally:
            for actor in ranks:
                ray.kill(actor)
            _on_their_nodes(end_process, places)
        return _judge(results, places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    def _reserve(self) -> PlacementGroup:
        """Reserve the resources of all ranks and engines at once, so that no part of a run waits for another one."""
        bundles = _bundles(self._config)
        group = placement_group(bundles, strategy="PACK")
        self._closing.callback(remove_placement_group, group)
        deadline = time.monotonic() + self._settings.start_timeout
        while not group.wait(min(MESSAGE_SECONDS, self._settings.start_timeout)):
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            others = f", {self._settings.environments} environments" if self._settings.environments else ""
            ranks, engines = self._settings.ranks, len(self._names)
            needs = f"the run needs {_sum(bundles)} for {ranks} ranks{others} and {engines} engines"
            if time.monotonic() > deadline:
                raise TrainError(
                    f"{needs}, but the Ray cluster had no room for them within {self._settings.start_timeout:g} s "
                    f"(cluster.start_timeout); free are {free}"
                )
            _say(f"waiting for room in the Ray cluster: {needs}; free are {free}")
        return group

    def _actor(self, kind: type, bundle: int, **options: Any) -> Any:
        settings = self._settings
        cpus, gpus, calls = {
            RankActor: (settings.cpus_per_rank, settings.gpus_per_rank, 1),
            EngineActor: (settings.cpus_per_engine, settings.gpus_per_engine, REQUESTS),
            EnvironmentActor: (settings.cpus_per_environment, 0, self._config.asynchronous.environment_threads),
        }[kind]
        return ray.remote(kind).options(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            max_concurrency=calls,
            **options,
        )

    def _close_engines(self) -> None:
        """Close the engines in order; what does not answer is ended with its actor."""
        if self._engines:
            closed = [actor.close.remote() for actor in self._engines]
            ray.wait(closed, num_returns=len(closed), timeout=CLOSING_SECONDS)
        for actor in self._engines:
            ray.kill(actor)


@contextlib.contextmanager
def _connected(config: TrainConfig) -> Iterator[None]:
    """Connect to the cluster of `cluster.address`, or start Ray on this machine, for the block."""
    address = config.cluster.address
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run reports to nobody
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank has its own message; torch writes pages
    options: dict[str, Any] = {"namespace": f"router-replay-{uuid.uuid4()}", "logging_level": "WARNING"}
    if address:
        path = os.environ.get("PYTHONPATH")
        options |= {"address": address, "runtime_env": {"env_vars": {"PYTHONPATH": path}} if path else None}
    else:  # CPUs are only counted, so a small machine may run more processes than it has cores
        needed = math.ceil(sum(bundle["CPU"] for bundle in _bundles(config)))
        options |= {"include_dashboard": False, "num_cpus": max(needed, os.cpu_count() or 1)}
        options["object_store_memory"] = config.cluster.object_store_bytes or None
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"cluster.address = {address!r}" if address else "this machine"
        raise TrainError(f"Ray could not be reached or started ({where}): {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _bundles(config: TrainConfig) -> list[dict[str, float]]:
    cluster = config.cluster
    engines = sum(table.kind not in table.behind_url for table in config.all_engines.values())
    rank = {"CPU": cluster.cpus_per_rank} | ({"GPU": cluster.gpus_per_rank} if cluster.gpus_per_rank else {})
    engine = {"CPU": cluster.cpus_per_engine} | ({"GPU": cluster.gpus_per_engine} if cluster.gpus_per_engine else {})
    environment = {"CPU": cluster.cpus_per_environment}
    return [
        *(dict(rank) for _ in range(cluster.ranks)),
        *(dict(engine) for _ in range(engines)),
        *(dict(environment) for _ in range(cluster.environments)),
    ]


def _sum(bundles: list[dict[str, float]]) -> str:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return " and ".join(f"{sum(bundle.get(name, 0) for bundle in bundles):g} {name}" for name in names)


def _refuse_idle_gpus(config: TrainConfig) -> None:
    """Ray hides the GPUs that an actor did not ask for, so a run would be on the CPU without a word."""
    found, cluster = ray.cluster_resources().get("GPU", 0), config.cluster
    if found and config.model.device != "cpu" and not cluster.gpus_per_rank:
        raise ConfigError(
            f"cluster.gpus_per_rank = 0, but the Ray cluster has {found:g} GPUs: set it to 1, or model.device = "
            '"cpu" to train without them'
        )


# -- the ranks ----------------------------------------------------------------------------------


def _results(answers: list[Any], ranks: list[Any]) -> list[Any]:
    """Return what each rank returned or raised, in their order.

    After one rank died, the others have some seconds to notice it and end by themselves.
    """
    results: dict[int, Any] = {}
    waiting, deadline = list(answers), math.inf
    while waiting:
        done, waiting = ray.wait(waiting, timeout=1.0)
        for answer in done:
            rank = answers.index(answer)
            try:
                results[rank] = ray.get(answer)
            except RayError as error:
                results[rank] = error
                if isinstance(error, RayActorError):
                    deadline = min(deadline, time.monotonic() + GRACE + HEARD + 5)
        if waiting and time.monotonic() > deadline:
            late = [answers.index(answer) for answer in waiting]
            _say(f"ranks {late} still wait for a rank that died, and are ended")
            for rank in late:
                ray.kill(ranks[rank])
            deadline = math.inf
    return [results[rank] for rank in range(len(answers))]


def _judge(results: list[Any], places: list[Place]) -> tuple[Progress | None, str]:
    """Return the progress; or None, and which rank died. Raise the error if a rank raised one.

    When a process dies, the others raise errors of torch about a lost connection: these are no reason to end the run.
    """
    if all(isinstance(result, Progress) for result in results):
        return results[0], ""
    raised = [result.cause for result in results if isinstance(result, RayTaskError)]
    own = [error for error in raised if isinstance(error, RouterReplayError) and not isinstance(error, RankFailed)]
    if own:
        raise own[0]
    died = [rank for rank, result in enumerate(results) if isinstance(result, RayActorError)]
    if died:
        named = ", ".join(f"rank {rank} (process {places[rank].pid} on {places[rank].address})" for rank in died)
        return None, f"the process of {named} died"
    raise next(iter(raised), None) or next(result for result in results if not isinstance(result, Progress))


@contextlib.contextmanager
def _stopping(places: list[Place]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM of the driver on to the ranks, which save the state. A second one ends the run."""
    asked = False

    def on_signal(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        _on_their_nodes(interrupt_process, places)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_their_nodes(work: Any, places: list[Place]) -> None:
    """Call `work` with the process id of each rank, on its machine."""
    calls = [
        ray.remote(work)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False))
        .remote(place.pid)
        for place in places
    ]
    ray.wait(calls, num_returns=len(calls), timeout=CLOSING_SECONDS)


def _get(answers: list[Any], what: str, settings: Any) -> Any:
    """Return the answers of actors that start. A message tells for how many of them the driver waits."""
    deadline, waiting = time.monotonic() + settings.start_timeout, list(answers)
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(MESSAGE_SECONDS, settings.start_timeout))
        missing = [answers.index(answer) for answer in waiting]
        if waiting and time.monotonic() > deadline:
            raise TrainError(
                f"{what} {missing} did not start within {settings.start_timeout:g} s (cluster.start_timeout)"
            )
        if waiting:
            _say(f"waiting for {what} {missing} to start")
    try:
        return ray.get(answers)
    except RayError as error:
        raise TrainError(f"{what} could not start: {error}") from error


def _say(text: str) -> None:
    sys.stderr.write(f"router-replay train: {text}\n")
    sys.stderr.flush()
