"""A run on a Ray cluster that runs already, with two nodes: the engines get their weights through the object store."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from ray.cluster_utils import Cluster

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
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
