"""`router-replay train` with trainer.backend = "megatron": one process, and two in each division under torchrun."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from router_replay.recipes.tiny.model import make_config, make_tokenizer, recipe_for
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.state import checkpoints
from tests.rl.conftest import settings_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIVISIONS = {
    "data": [],
    "expert": ["megatron.expert_parallel=2"],
    "tensor": ["megatron.tensor_parallel=2"],
    "pipeline": ["megatron.pipeline_parallel=2", "megatron.recompute=full"],
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of the loop's tests, on a random model with an even number of layers and experts."""
    folder = tmp_path_factory.mktemp("train")
    config = make_config(recipe_for("tiny"))
    config.num_hidden_layers, config.num_experts, config.num_experts_per_tok = 4, 16, 4
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": f"{number + 10}+{number + 20}=", "answer": ""}) for number in range(12)]
    (folder / "problems.jsonl").write_text("\n".join(lines))
    return settings_of(folder / "model", folder / "problems.jsonl", pathlib.Path("set below"))[1:]


def train(
    settings: list[str],
    output: pathlib.Path,
    *more: str,
    processes: int = 1,
    resume: bool = False,
    module: str = "tests.megatron_real.command",
) -> list[Any]:
    """Run the command of `module` and return the metrics of its steps."""
    given = [*settings, f"output={output}", "trainer.backend=megatron", *more]
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"] if processes > 1 else []
    command = [sys.executable, *launch, "-m", module, "train", *(["--resume"] if resume else [])]
    done = subprocess.run(
        [*command, *(part for setting in given for part in ("--set", setting))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
        check=False,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(output)


def weights(output: pathlib.Path) -> dict[str, torch.Tensor]:
    folder = checkpoints.latest(output)
    assert folder is not None
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of one process in mode R3."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(settings, output, "replay=r3", "steps=3", "checkpoint.every=2", "checkpoint.keep=9")
    return output


def same_first_step(got: dict[str, float], expected: dict[str, float]) -> None:
    """Rollouts of the first step come from the same weights, so all its figures are equal up to rounding.

    AdamW makes a visible step of a gradient that is only rounding; the figures of the second mini-batch come after one.
    """
    for name in ("loss", "grad_norm", "entropy", "ppo_kl", "reward", "tokens", "clip_fraction"):
        assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert got["routes/agreement"] == pytest.approx(expected["routes/agreement"], abs=2e-3)
    for name in ("routing/load", "routing/load_worst", "routing/confidence", "routing/entropy"):
        assert got[name] == pytest.approx(expected[name], rel=1e-3), name


def test_r3_trains_as_with_transformers(settings: list[str], alone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    lines = read_metrics(alone)
    assert len(lines) == 3
    for line in lines:
        assert line["mismatch/k3"] < 1e-6
        assert line["routes/live"] == 0
        assert line["routes/replayed"] > 0
    expected = train(settings, tmp_path / "run", "trainer.backend=transformers", "replay=r3", "steps=1")
    same_first_step(lines[0], expected[0])


@pytest.mark.parametrize("name", list(DIVISIONS))
def test_two_processes_train_as_one(
    settings: list[str], alone: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    lines = train(settings, tmp_path / "run", "replay=r3", "steps=2", *DIVISIONS[name], processes=2)
    assert len(lines) == 2
    same_first_step(lines[0], read_metrics(alone)[0])
    for line in lines:
        assert line["mismatch/k3"] < 1e-6
        assert line["routes/live"] == 0


def test_r2_trains_and_replays_its_own_rows(settings: list[str], alone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    more = ["replay=r2", "steps=2", "megatron.pipeline_parallel=2"]
    lines = train(settings, tmp_path / "run", *more, processes=2)
    expected = train(settings, tmp_path / "other", "trainer.backend=transformers", "replay=r2", "steps=1")
    same_first_step(lines[0], expected[0])
    assert all(line["routes/replayed"] > 0 for line in lines)
    assert all(line["mismatch/k3"] < 1e-6 for line in lines)


def test_a_run_goes_on_as_the_run_that_it_was(settings: list[str], alone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    two, three = ("replay=r3", "steps=2", "checkpoint.every=1"), ("replay=r3", "steps=3", "checkpoint.every=1")
    train(settings, tmp_path / "run", *two)
    train(settings, tmp_path / "run", *three, resume=True)
    expected = weights(alone)
    got = weights(tmp_path / "run")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_run_goes_on_in_another_division_and_with_transformers(
    settings: list[str], alone: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Checkpoints hold whole tensors by Hugging Face names, so they fit every division and the other backend."""
    output = tmp_path / "run"
    train(settings, output, "replay=r3", "steps=1")
    train(settings, output, "replay=r3", "steps=2", *DIVISIONS["pipeline"], processes=2, resume=True)
    lines = train(settings, output, "replay=r3", "steps=3", "trainer.backend=transformers", resume=True)
    before = read_metrics(alone)
    for got, expected in zip(lines, before, strict=True):
        assert got["tokens"] == expected["tokens"]
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
