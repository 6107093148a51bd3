"""Test new weights by CUDA IPC: vLLM with the plugin maps memory of the trainer on the GPU that both use.

With --device cpu the same tests run with the way that `auto` then chooses, shared memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from router_replay.engines import Request
from router_replay.engines.vllm.cuda_weights import CudaWeights
from router_replay.errors import EngineError
from router_replay.rl.config import EngineConfig
from router_replay.rl.engine_start import CPU_ENVIRONMENT
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.weights.sync import WeightSync
from tests.gpu.conftest import SAMPLING, Trainer, prompts

ROOT = pathlib.Path(__file__).parents[2]


def test_weights_by_cuda_ipc_are_those_that_were_pushed(
    engine: Any, trainer: Trainer, new_trainer: Trainer, folders: list[pathlib.Path], device: str
) -> None:
    """vLLM's loader takes the first version; the later ones are written into its tensors. All share one memory."""
    on_gpu = device == "cuda"
    requests = [Request(tokens, SAMPLING) for tokens in prompts(16, 60, seed=4)]
    config = EngineConfig(kind="vllm", dtype="bfloat16", transfer="cuda_ipc" if on_gpu else "auto")
    sync = WeightSync(config, trainer.model, trainer.replayer.router_names)
    done = engine.generate(requests)
    assert trainer.gap(requests, done) < 0.01 * new_trainer.gap(requests, done)
    before = torch.cuda.memory_allocated() if on_gpu else 0  # after the passes of both models, which keep a workspace
    try:
        words = sync.prepare([engine], trainer.model.state_dict(), 0 if on_gpu else None)
        assert words == ("by CUDA IPC" if on_gpu else "by shared memory")
        taken = torch.cuda.memory_allocated() - before if on_gpu else 0
        memories = set()
        for version, (right, wrong) in enumerate([(new_trainer, trainer), (trainer, new_trainer)] * 2, 1):
            source = sync.source(right.model.state_dict(), version)
            memories.add(id(source))
            engine.update_weights(source, version)
            done = engine.generate(requests)
            assert {int(one) for completion in done for one in completion.versions} == {version}
            assert right.gap(requests, done) < 0.01 * wrong.gap(requests, done)
        assert len(memories) == 1
        if on_gpu:
            assert engine.report()["weights"]["seconds_direct"] > 0
            assert taken >= sum(2 * one.numel() for one in trainer.model.parameters())
    finally:
        engine.update_weights(folders[0], 0)
        sync.close()
    if on_gpu:
        assert torch.cuda.memory_allocated() - before < taken / 2


def test_the_memory_is_given_back_although_nobody_read_it(device: str) -> None:
    if device == "cpu":
        pytest.skip("this needs memory of a GPU")
    before = torch.cuda.memory_allocated()
    weights = CudaWeights({"a": torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")}, 0)
    weights.write_each([("a", torch.ones(1 << 20, device="cuda"))])
    assert torch.cuda.memory_allocated() - before >= 2 << 20
    weights.close()
    weights.close()
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(EngineError, match="was closed"):
        weights.write_each([("a", torch.ones(1 << 20, device="cuda"))])


def test_more_weights_than_the_gpu_has_room_for_are_an_error(device: str) -> None:
    if device == "cpu":
        pytest.skip("this needs memory of a GPU")
    with pytest.raises(EngineError, match=r"\d+ MiB of the memory of GPU-.* cannot be shared: "):
        CudaWeights({"a": torch.empty(1 << 42, dtype=torch.bfloat16, device="meta")}, 0)


# -- a run --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random model of the shape in conftest.py, with a tokenizer."""
    from transformers import Qwen3MoeForCausalLM

    from router_replay.recipes.tiny.model import make_config, make_tokenizer, recipe_for

    recipe = dataclasses.replace(recipe_for("gpu"), layers=4, width=256, heads=4, key_value_heads=2, experts=32)
    config = make_config(recipe)
    config.initializer_range = 0.05
    folder = tmp_path_factory.mktemp("models") / "random"
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_run_gives_vllm_its_weights_by_cuda_ipc(
    model: pathlib.Path, tmp_path: pathlib.Path, device: str, loop: str
) -> None:
    """In a process of its own, because vLLM can run once in a process.

    No token is older than the policy, so k3 stays at the rounding of bfloat16, 2e-5, only if the engine has the weights
    of each update. An engine that kept those of the start had 0.9 in the second step.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"prompt": f"{number}+{number}=", "answer": ""}) for number in range(12)))
    settings = [
        f"output={tmp_path / 'run'}", f"loop={loop}", "steps=3", f"model.path={model}", f"model.device={device}",
        "model.dtype=bfloat16", "engine.kind=vllm", "engine.dtype=bfloat16", "engine.max_length=64",
        "engine.arguments.enforce_eager=true", "environment.kind=jsonl", f"environment.file={problems}",
        "environment.reward=tests.rl.rewards:sevens", "rollout.prompts=4", "rollout.group=8", "rollout.max_tokens=12",
        "trainer.max_tokens=1024", "optimizer.lr=1e-3", "checkpoint.every=0", "logging.tensorboard=false",
    ]  # fmt: skip
    if device == "cuda":  # the trainer, and perhaps the engine of the other tests, use the same GPU
        settings += ["engine.transfer=cuda_ipc", "engine.arguments.gpu_memory_utilization=0.2"]
        settings += [f"engine.arguments.kv_cache_memory_bytes={1 << 30}", "engine.arguments.max_num_seqs=64"]
    if loop == "async":
        settings += ["asynchronous.max_staleness=0", "loss.truncated_importance=2"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    more = CPU_ENVIRONMENT if device == "cpu" else {}
    found = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **more, "PYTHONPATH": found}
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its kernels are compiled, and not every machine can
    command = [sys.executable, "-m", "router_replay.cli", "train", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert f"new weights: {'by CUDA IPC' if device == 'cuda' else 'by shared memory'}" in done.stdout
    lines = read_metrics(tmp_path / "run")
    print([(line["mismatch/k3"], line["seconds/sync"], line["seconds/step"]) for line in lines])  # noqa: T201  with -s
    assert [line["version"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["sync/cuda_ipc"] == (1 if device == "cuda" else 0)
        assert line["sync/share_of_step"] == pytest.approx(line["seconds/sync"] / line["seconds/step"])
        assert line["grad_norm"] > 0
        assert line["routes/live"] == 0
        assert line["mismatch/k3"] < 1e-3
    assert all(np.isfinite(line["loss"]) for line in lines)
