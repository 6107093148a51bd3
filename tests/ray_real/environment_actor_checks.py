"""Environments in Ray actors: what a kill -9 of their process leaves. Real processes."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from router_replay.errors import RewardError, TrainError
from router_replay.recipes.tiny.model import make_tokenizer
from router_replay.rl.cluster.driver import Cluster, _connected
from router_replay.rl.cluster.environments import EnvironmentActor, RayEnvironment, RayTask, _Worker
from router_replay.rl.config import RolloutConfig, TrainConfig, load_config
from router_replay.rl.environments import make_task
from router_replay.rl.environments.base import EnvironmentLost
from router_replay.rl.rollout.player import Player
from tests.rl.cluster import games
from tests.rl.rollout.chance_engine import ChanceEngine

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def config_of(random_model: pathlib.Path) -> Callable[[str], TrainConfig]:
    """The config of a run with a game of tests.rl.cluster.games."""
    return lambda game: load_config(
        None,
        [
            f"model.path={random_model}", "cluster.kind=ray", "cluster.environments=2", "engine.url=http://x",
            "engine.kind=vllm_http", f"environment.kind=tests.rl.cluster.games:{game}",
            "environment.arguments={kills = false}",
        ],
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster(config_of: Callable[[str], TrainConfig]) -> Iterator[None]:
    """Two actors with the game Steady, as the driver makes them."""
    config = config_of("Steady")
    with _connected(config), Cluster(config):
        yield


@pytest.fixture(scope="module")
def task(cluster: None, config_of: Callable[[str], TrainConfig]) -> RayTask:
    config = config_of("Steady")
    return RayTask(make_task(config.environment, TOKENIZER, 0), config)


def environment_of(game: str, config_of: Callable[[str], TrainConfig]) -> tuple[RayEnvironment, Any]:
    """An environment in an actor of its own, and the actor."""
    options: dict[str, Any] = {"name": game, "num_cpus": 0, "max_restarts": -1}
    actor = ray.remote(EnvironmentActor).options(**options).remote(config_of(game), os.getcwd())
    return RayEnvironment(_Worker(game), game), actor


def pid_of(environment: Any) -> int:
    return int(ray.get(environment._worker.actor.where.remote())[1])


def test_an_episode_goes_on_in_a_new_process(task: RayTask) -> None:
    alone = games.Steady(TOKENIZER, 0, kills=False).environment()
    here, other = task.environment(), task.environment()
    assert pid_of(here) != pid_of(other)
    assert here.reset(11) == tuple(alone.reset(11))
    turns = [[7], [8, 9, 10], [11]]
    assert here.step(turns[0]) == alone.step(turns[0])
    assert here.step(turns[1]) == alone.step(turns[1])
    died = pid_of(here)
    os.kill(died, signal.SIGKILL)
    assert here.step(turns[2]) == alone.step(turns[2])  # the number of all tokens so far, and the end
    assert pid_of(here) != died
    assert other.reset(3) == tuple(alone.reset(3))


def test_an_environment_that_answers_otherwise_is_lost(config_of: Callable[[str], TrainConfig]) -> None:
    environment, actor = environment_of("Moody", config_of)
    environment.reset(1)
    environment.step([7])
    os.kill(pid_of(environment), signal.SIGKILL)
    with pytest.raises(EnvironmentLost, match=r"problem 1: .*\(Moody\) died, and it then answered turn 0 otherwise"):
        environment.step([8])
    ray.kill(actor)


def test_a_turn_that_kills_every_process_is_given_up(config_of: Callable[[str], TrainConfig]) -> None:
    environment, actor = environment_of("Deadly", config_of)
    environment.reset(1)
    environment.step([7])
    with pytest.raises(EnvironmentLost, match="that happened 3 times at turn 1"):
        environment.step([8])
    ray.kill(actor)


def test_errors_of_the_environment_arrive_as_they_are(config_of: Callable[[str], TrainConfig]) -> None:
    environment, actor = environment_of("Broken", config_of)

    class Task:
        stop_token_ids, problems, max_turns, name = (), None, 3, "Broken"

        def environment(self) -> Any:
            return environment

    expected = "problem 4, turn 0: the environment of Broken in Broken.step raised ValueError: no note today"
    with ChanceEngine(0) as engine:
        player = Player(engine, Task(), RolloutConfig(), 64)  # type: ignore[arg-type]
        episode = player.reset(0, 0, 4)
        with pytest.raises(RewardError, match=expected):
            player.step(episode, episode.prompt, [7])
    ray.kill(actor)


def test_episodes_that_ended_are_forgotten(task: RayTask) -> None:
    def count(worker: Any) -> int:
        return ray.get(worker.actor.__ray_call__.remote(lambda self: len(self._open)))

    gc.collect()
    for _ in range(3):
        environment = task.environment()
        environment.reset(2)
        del environment
        gc.collect()
    assert sum(worker.episodes for worker in task._workers) == 0
    assert max(count(worker) for worker in task._workers) <= 1


def test_an_actor_that_is_not_there_is_named(config_of: Callable[[str], TrainConfig]) -> None:
    with pytest.raises(TrainError, match="environment9 has no actor in this Ray cluster"):
        _Worker("environment9")
