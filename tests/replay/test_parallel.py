"""Two processes over gloo against one: the same loss, the same router gradients, exactly the routes asked for."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.replay import parallel_worker as worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        mlp_only_layers=[0], max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    return worker.run(worker.load(folder), worker.make_batch())


@pytest.fixture(scope="module")
def together(folder: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    root = pathlib.Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.replay.parallel_worker", folder],
            cwd=root,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(pathlib.Path(folder, f"rank{rank}.pt"), weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("kind", list(worker.KINDS))
def test_two_processes_equal_one(kind: str, alone: dict, together: list[dict]) -> None:
    for result in together:
        assert "error" not in result[kind], result[kind]["error"]
        assert result[kind]["exact"], "other experts were used than the routes said"
        assert torch.allclose(result[kind]["loss"], alone["loss"], atol=1e-5)
        gates = {name for name in alone["grads"] if name.endswith("mlp.gate.weight")}
        assert len(gates) == 2
        for name in alone["grads"] if kind in worker.EVERY_GRADIENT else gates:
            gradient = alone["grads"][name]
            assert gradient.abs().max() > 1e-4
            assert torch.allclose(result[kind]["grads"][name], gradient, atol=1e-5), name
    replayed = [result[kind]["rows"][0] for result in together]
    whole = alone["rows"][0]
    assert replayed == [whole, whole] or sum(replayed) == whole  # the same tokens on both ranks, or a part each


def test_the_reference_is_not_the_live_pass(alone: dict, folder: str) -> None:
    """If the forced routes were the model's own choice, a replay that does nothing would pass above."""
    model, batch = worker.load(folder), worker.make_batch()
    live = worker.logprobs(model, batch)
    loss = -(live * torch.from_numpy(batch.label_mask)).sum() / worker.TOTAL
    assert (loss - alone["loss"]).abs() > 1e-3
