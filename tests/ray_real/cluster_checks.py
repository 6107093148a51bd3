"""A Ray cluster that runs already, with two nodes: weights and routes reach the other one through the object store."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import ray
from ray.cluster_utils import Cluster

from router_replay import RouterSpec, Routes
from router_replay.rl.cluster.routes import StoredRoutes, keep
from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from tests.makers import random_routes
from tests.rl.cluster.command import COMMON, assert_like_a_run_of_one_process, run


def test_a_run_on_a_cluster_of_two_nodes(
    make_config: Callable[..., TrainConfig],
    settings: list[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node has room for two of the four actors, so at least one engine is not on the node of the first rank."""
    whole, output = tmp_path / "whole", tmp_path / "cluster"
    train(make_config(*COMMON, f"output={whole}"))
    monkeypatch.setenv("FAULTS", str(tmp_path))  # the actors have the environment of the cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        nodes = "environment.reward=tests.rl.cluster.faults:note_nodes"
        run(settings, tmp_path, f"output={output}", f"cluster.address={cluster.address}", nodes)
    finally:
        cluster.shutdown()
    assert_like_a_run_of_one_process(output, whole)
    assert (tmp_path / "nodes").read_text() == "2"


def test_a_share_is_cut_out_on_the_node_that_has_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's own store has only what was sent to it: the whole object, or less than a twentieth."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    spec = RouterSpec(num_experts=128, top_k=8, layers=tuple(range(32)))
    routes = random_routes(20_000, spec).sorted()
    try:
        cluster.add_node(num_cpus=1, resources={"other": 1})
        ray.init(address=cluster.address, logging_level="WARNING")
        for codec in ("sets", "dense"):
            source = keep(routes, codec)
            size = len(ray.get(source.reference))
            reader = ray.remote(OnTheOtherNode).options(resources={"other": 1}).remote()
            part, arrived = ray.get(reader.read.remote([source], 1000, 2000, (5, 6)))
            assert part == routes[1000:2000].select_layers((5, 6))
            assert arrived < size / 20
            whole, arrived = ray.get(reader.read.remote([source], 0, None, None))
            assert whole == routes
            assert arrived > 0.9 * size
            ray.kill(reader)
    finally:
        ray.shutdown()
        cluster.shutdown()


class OnTheOtherNode:
    """Read from another node, and see how much of the object the store of this node then has."""

    def read(
        self, sources: list[StoredRoutes], first: int, last: int | None, layers: tuple[int, ...] | None
    ) -> tuple[Routes, int]:
        [source] = sources
        rows = source.read(first, last, layers)
        return rows, len(ray.get(source.reference)) if self._has(source) else rows.nbytes

    def _has(self, source: StoredRoutes) -> bool:
        here = ray.get_runtime_context().get_node_id()
        found = ray.experimental.get_object_locations([source.reference])
        return here in found[source.reference]["node_ids"]
