"""Pages of every kind with made-up numbers, written by the functions that the commands use."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from router_replay.report import Run, Seen, write_report, write_trajectories, write_verdict
from tests.report.test_trajectory_page import routes
from tests.report.test_verdict_page import VERDICT, made_up

MODES = ("off", "R2", "R3")
STEPS = 30


def line(step: int, mode: int) -> dict[str, Any]:
    """The metrics of a step, with a metric of each layer and a value that is not finite."""
    return {
        "step": step,
        "reward": 0.5 + 0.01 * step + 0.02 * mode,
        "mismatch/k3": (3e-3, 2.8e-3, 4e-4)[mode] * (1.2 + math.sin(step)),
        "mismatch/extreme_tau2": (1e-3, 9e-4, 0.0)[mode],
        "routes/agreement": 0.95,
        "routes/replayed": (0, 100, 100)[mode],
        "routes/live": (100, 0, 0)[mode],
        "grad_norm": None if step == 7 and mode == 0 else 1.0 + 0.1 * mode,
        "seconds/step": 3.0 + 0.1 * math.cos(step),
        "routes/agreement/layers": [0.95 - 0.02 * layer - 0.01 * mode for layer in range(8)],
        "routing/layers": list(range(1, 9)),
    }


def write_run(folder: pathlib.Path, mode: int, steps: int) -> Run:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line(step, mode)) + "\n" for step in range(steps))
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.json").write_text(json.dumps({"replay": MODES[mode].lower(), "seed": 0}))
    return Run(MODES[mode], folder)


def make(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Write the pages into `folder`, and return their files by name."""
    names = ("runs", "long", "verdict", "fault", "trajectories")
    out = {name: folder / f"{name}.html" for name in names}
    write_report([write_run(folder / "short" / name, i, STEPS) for i, name in enumerate(MODES)], out["runs"], "Runs")
    write_report([write_run(folder / "long" / name, i, 100_000) for i, name in enumerate(MODES)], out["long"], "Long")
    seen = made_up(50, 2000, 48, 128)
    write_verdict(VERDICT, ["the verdict in words"], seen, out["verdict"])
    shifted = dataclasses.replace(seen, differs=np.random.default_rng(1).random(seen.differs.shape) < 0.9)
    fault = {"fault": "shift", "cause": "the rows are shifted by one token", "detail": "all sequences"}
    write_verdict(VERDICT | {"finding": fault}, ["FAULT shift"], shifted, out["fault"])
    write_trajectories([_bands(number) for number in range(20)], ["20 trajectories"], out["trajectories"], _load(seen))
    return out


def _bands(number: int) -> dict[str, Any]:
    from router_replay.report import Lanes

    mask = np.arange(60) % 20 >= 8
    versions = np.where(np.arange(60) < 30, 3, 4)
    missing = (59,) if number % 2 else (2, 3, 59)
    return Lanes(f"trajectory {number}", routes(60, missing, versions), 0, mask, versions).bands


def _load(seen: Seen) -> tuple[tuple[int, ...], np.ndarray]:
    return seen.layers, seen.load
