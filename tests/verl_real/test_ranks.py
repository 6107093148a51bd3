"""Two processes over gloo train as one model with our replay does, under FSDP1 and FSDP2."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.verl_real import tiny

# isort: split
from tests.verl_real.ranks import WORLD
from tests.verl_real.test_engine import CLOSE, largest
from tests.verl_real.test_routing import imbalance

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny.save_model(folder / "model")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.verl_real.ranks", str(folder), str(rank)], cwd=ROOT, env=environment
        )
        for rank in range(WORLD)
    ]
    try:
        assert [rank.wait() for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:
            rank.kill()
    return model, [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", ["fsdp, packed", "fsdp2, packed", "fsdp2, padded"])
def test_two_ranks_compute_what_one_does(found: tuple[str, list[dict[str, Any]]], name: str) -> None:
    model, by_rank = found
    outputs = tiny.rollouts()
    expected, gradients = tiny.ours(model, outputs)
    for rank, results in enumerate(by_rank):
        result = results[name]
        assert largest([line[:-1] for line in result["log_probs"]], expected[rank::WORLD]) < CLOSE
        lengths = tiny.LENGTHS[rank::WORLD]
        assert result["metrics"]["routes/replayed"] == [sum(p + r - 1 for p, r in lengths)]
        assert result["metrics"]["routes/live"] == [0]
        assert result["metrics"]["routing/load"] == [pytest.approx(imbalance(outputs).mean())]  # of both ranks
        assert torch.equal(*result["recorded and replayed"])
        for key, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][key], gradient, rtol=1e-4, atol=1e-4)


def test_rows_follow_their_tokens_over_ulysses_ranks(found: tuple[str, list[dict[str, Any]]]) -> None:
    first, second = (results["ulysses"] for results in found[1])
    tokens = torch.cat([first["tokens"], second["tokens"]])
    total = sum(prompt + response for prompt, response in tiny.LENGTHS)
    assert tokens[tokens >= 0].tolist() == list(range(total))
    assert first["replayed"][0] + second["replayed"][0] == total
    assert torch.equal(first["routes"], second["routes"])  # gathered on both
    old, new, shifted = first["log_probs"]
    assert torch.equal(old, new)
    assert not torch.equal(old, shifted)
