"""Engines that get new weights as a folder: a real vLLM server by its URL, and a pool."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

from router_replay.engines import EmbeddedEngine, EnginePool, VllmHttpEngine
from router_replay.rl.config import tiny_folder
from tests.engines.conftest import start_server
from tests.trl_real import makers

# With the old weights, the second rollout would be far from the policy.
MOVED = {"learning_rate": 1e-3, "max_steps": 4, "lr_scheduler_type": "constant"}


def trained_on(made: Any) -> None:
    """Train two rollouts, and check that the engine had the policy's weights in both."""
    made.train()
    entries = [entry for entry in made.state.log_history if "routes/live" in entry]
    assert len(entries) == 4
    assert all(entry["routes/replayed"] > 0 and entry["routes/live"] == 0 for entry in entries)
    rollouts = [entry["mismatch/k3"] for entry in entries if "mismatch/k3" in entry]
    assert len(rollouts) == 2
    assert max(rollouts) < 1e-6  # both compute in float32
    assert made.engine.version == 2
    assert makers.gap(*made.seen[0]) < 1e-5
    assert makers.gap(*made.seen[1]) > 1e-2  # one update later


def test_a_vllm_server_by_its_url(tmp_path: pathlib.Path) -> None:
    folder = str(tiny_folder())
    server = start_server(folder, tmp_path / "server.log")
    try:
        made = makers.trainer(
            folder,
            tmp_path / "run",
            engine=lambda: server.wait(lambda: VllmHttpEngine(server.url)),
            kind=makers.Losses,
            **MOVED,
        )
        trained_on(made)
        made.close()
    finally:
        server.kill()


def test_a_pool_of_two_engines(make: Callable[..., Any], folder: str) -> None:
    engines = {name: EmbeddedEngine(folder, max_length=48) for name in ("one", "two")}
    trained_on(make("r3", engine=EnginePool(engines), kind=makers.Losses, **MOVED))
