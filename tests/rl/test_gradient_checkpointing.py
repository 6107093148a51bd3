"""Runs with gradient checkpointing: every kind of it trains the same weights under replay."""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import load_file

from router_replay.cli import main


def trained(settings: list[str], checkpointing: str, replay: str, output: pathlib.Path) -> dict[str, torch.Tensor]:
    more = [f"model.gradient_checkpointing={checkpointing}", f"replay={replay}", f"output={output}"]
    arguments = [part for setting in [*settings, *more] for part in ("--set", setting)]
    assert main(["train", *arguments]) == 0
    return load_file(output / "checkpoints" / "step_000002" / "model.safetensors")


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_reentrant_and_non_reentrant_checkpoints_train_the_same_weights(
    settings: list[str], replay: str, tmp_path: pathlib.Path
) -> None:
    """Both recompute with the routes of their own forward pass, so every update is the same to the bit."""
    reentrant = trained(settings, "reentrant", replay, tmp_path / "reentrant")
    other = trained(settings, "non_reentrant", replay, tmp_path / "non_reentrant")
    assert reentrant.keys() == other.keys()
    assert all(torch.equal(reentrant[name], other[name]) for name in other)
