"""A run goes on with another number of processes than it was started with. Real processes over gloo."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from tests.rl.state.test_checkpoints import ROOT, final_weights, lines

# Adam divides by the size of a gradient: rounding in one that is nearly zero must not decide a step.
COMMON = ["replay=r3", "optimizer.lr=1e-4", "optimizer.warmup_steps=3"]


def run(settings: list[str], processes: int, *more: str) -> None:
    arguments = [part for setting in [*settings, *COMMON, *more] for part in ("--set", setting)]
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    subprocess.run(
        [sys.executable, *command, "-m", "router_replay.cli", "train", "--resume", *arguments],
        env=environment, check=True, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [(2, 1, []), (1, 2, []), (1, 2, ["trainer.ulysses=2"])],
    ids=["2to1", "1to2", "ulysses"],
)
def test_a_run_goes_on_with_another_number_of_processes(
    make_config: Callable[..., TrainConfig],
    settings: list[str],
    tmp_path: pathlib.Path,
    before: int,
    after: int,
    more: list[str],
) -> None:
    """As a run that nobody interrupted: the optimizer's moments are taken over, each process its part of them."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(make_config(*COMMON, "steps=4", f"output={whole}"))
    if before == 1:
        train(make_config(*COMMON, "steps=2", f"output={cut}"))
    else:
        run(settings, before, "steps=2", f"output={cut}")
    run(settings, after, "steps=4", f"output={cut}", *more)
    [entry] = json.loads((cut / "config.json").read_text())["history"]
    assert (entry["step"], entry["changes"]["processes"]) == (2, [before, after])
    assert [line["step"] for line in lines(cut)] == [0, 1, 2, 3]
    for a, b in zip(lines(whole), lines(cut), strict=True):
        assert (a["reward"], a["lr"], a["version"]) == (b["reward"], b["lr"], b["version"])
        for name in ("loss", "grad_norm", "entropy", "ppo_kl"):
            assert abs(a[name] - b[name]) < 1e-5, (a["step"], name)
    expected, got = final_weights(whole), final_weights(cut)
    assert max(float((expected[name] - got[name]).abs().max()) for name in expected) < 2e-5
