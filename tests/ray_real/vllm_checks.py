"""A run on Ray with two trainer ranks and two real vLLM engines on the CPU, one of which is killed in the middle."""

from __future__ import annotations

import pathlib

from tests.rl.cluster.command import engines_seen, run
from tests.rl.state.test_checkpoints import lines


def test_vllm_runs_in_an_actor_and_starts_again_after_a_kill(settings: list[str], tmp_path: pathlib.Path) -> None:
    output = tmp_path / "vllm"
    killing = "environment.reward=tests.rl.cluster.faults:kill_engine"
    said = run(settings, tmp_path, f"output={output}", "engine.kind=vllm", "steps=6", killing)
    assert [line["step"] for line in lines(output)] == list(range(6))
    assert all(line["routes/live"] == 0 for line in lines(output))
    assert all(line["mismatch/k3"] < 1e-6 for line in lines(output))  # float32 on both sides
    assert "engine engine0 does not answer and gets no more requests" in said
    assert len(engines_seen(tmp_path)) == 6
