"""Megatron's ranks as Ray actors: rows reach each rank by reference, and the run is that of one process."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

from router_replay.rl.log.metrics import read_metrics
from tests.megatron_real.test_train import alone, same_first_step, settings, train

__all__ = ["alone", "settings"]

ON_RAY = ["cluster.kind=ray", "cluster.ranks=2", "engine.count=2", "replay=r3", "steps=2"]


ALL = "[0, 1, 2, 3]"


@pytest.mark.parametrize(
    ("division", "layers"),
    [
        (["megatron.expert_parallel=2"], [ALL, ALL]),
        (["megatron.pipeline_parallel=2", "megatron.recompute=full"], ["[0, 1]", "[2, 3]"]),
    ],
    ids=["expert", "pipeline"],
)
def test_two_ranks_on_ray_train_as_one_process_and_read_their_own_layers(
    settings: list[str],
    alone: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    division: list[str],
    layers: list[str],
) -> None:
    monkeypatch.setenv("READ_LAYERS", str(tmp_path))
    lines = train(settings, tmp_path / "run", *ON_RAY, *division, module="tests.megatron_real.on_ray")
    assert len(lines) == 2
    same_first_step(lines[0], read_metrics(alone)[0])
    for line in lines:
        assert line["mismatch/k3"] < 1e-6
        assert line["routes/live"] == 0
    assert [{*(tmp_path / f"rank{rank}").read_text().splitlines()} for rank in (0, 1)] == [{one} for one in layers]
