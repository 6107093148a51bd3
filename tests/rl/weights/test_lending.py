"""Weights leave several ranks a tensor at a time, and return shard by shard: no rank holds the whole. Real processes.

The ranks run `tests.rl.weights.lending_worker`. What they hold beside their shards is counted at one place, `held`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.rl.state.test_checkpoints import ROOT

Folder = pathlib.Path


@pytest.fixture(scope="module")
def found(random_model: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """What two ranks wrote: every weight in all ways that it can leave, and what each way cost."""
    folder = tmp_path_factory.mktemp("lending")
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    worker = ["-m", "tests.rl.weights.lending_worker", str(random_model), str(folder)]
    subprocess.run([sys.executable, *command, *worker], env=environment, check=True, timeout=600)
    return folder


def sizes(model: Folder) -> tuple[int, int]:
    """The bytes of the model in float32, and of the largest tensor as the module has it (the fused experts)."""
    tensors = load_file(model / "model.safetensors")
    fused: dict[str, int] = {}
    for name, tensor in tensors.items():
        layer, experts, rest = name.partition(".experts.")
        kind = "down" if "down" in rest else "gate_up"
        key = f"{layer}{experts}{kind}" if experts else name
        fused[key] = fused.get(key, 0) + tensor.numel() * 4
    return sum(fused.values()), max(fused.values())


@pytest.mark.parametrize("way", ["folder", "shared memory", "embedded engine", "checkpoint"])
def test_the_first_rank_holds_two_tensors_at_most_while_the_whole_model_leaves(
    found: Folder, random_model: Folder, way: str
) -> None:
    """One that was gathered, and its cast; the optimizer's moments are twice the model."""
    whole, largest = sizes(random_model)
    for rank in range(2):
        cost = json.loads((found / f"costs_{rank}.json").read_text())[way]
        assert cost["total"] >= whole * (3 if way == "checkpoint" else 1)
        assert cost["most"] <= 2 * largest < whole / 2
        assert cost["now"] == 0  # nothing stays


@pytest.mark.parametrize("way", ["start", "resume"])
def test_each_rank_reads_its_own_shard_of_a_checkpoint(found: Folder, random_model: Folder, way: str) -> None:
    """One tensor of its shard at a time; of everything its half, and of the other half nothing."""
    whole, largest = sizes(random_model)
    parts = 3 if way == "resume" else 1  # weights and two moments
    for rank in range(2):
        cost = json.loads((found / f"costs_{rank}.json").read_text())[way]
        assert cost == {"now": 0, "most": largest // 2, "total": parts * whole // 2}


def test_what_left_is_the_model_to_the_bit(found: Folder) -> None:
    """Against torch's own way to gather a whole state dict, which the ranks used beside ours."""
    expected = torch.load(found / "expected.pt")
    for way in ("folder", "checkpoint"):
        got = load_file(found / way / "model.safetensors")
        assert got.keys() == expected["weights"].keys()
        assert all(torch.equal(got[name], expected["weights"][name]) for name in got)
    moments = load_file(found / "checkpoint" / "optimizer.safetensors")
    assert moments.keys() == expected["moments"].keys()
    assert all(torch.equal(moments[name], expected["moments"][name]) for name in moments)
    other = torch.load(found / "shared.pt")
    assert all(torch.equal(other[name], expected["weights"][name].bfloat16()) for name in expected["weights"])


def test_what_was_read_is_what_was_written_to_the_bit(found: Folder) -> None:
    """A policy that resumed has the weights and the moments of the one that wrote the checkpoint."""
    expected, got = torch.load(found / "expected.pt"), torch.load(found / "resumed.pt")
    assert all(torch.equal(got["weights"][name], tensor) for name, tensor in expected["weights"].items())
    assert all(torch.equal(got["moments"][name], tensor) for name, tensor in expected["moments"].items())
    assert got["steps"] == expected["steps"]
    assert got["buffers_equal"]
