"""Run the demo: train one model with the same seeds, with replay off and with R3, and show the difference."""

from __future__ import annotations

import pathlib
import shutil

from router_replay.errors import ConfigError
from router_replay.report import Row, Run, comparison, write_report
from router_replay.report.library import check_library
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.loop.train import train
from router_replay.rl.state.run_folder import LOCK, hold

MODES = ("off", "r3")
MARK = ".demo"
"""The file that marks the folder of a run that the next demo may remove."""
PROMISED_FALL = 3.0
LEAST_REWARD_GAP = 0.05
"""A smaller difference of the last rewards is noise: of 512 sampled answers, and between runs."""


def demo_config(
    mode: str, out: pathlib.Path, steps: int, fp8: bool = False, float32_routers: bool = False
) -> TrainConfig:
    """Return the config of one run: two-digit additions, the tiny model, vLLM in bfloat16, the trainer in float32."""
    router_dtype = "float32" if float32_routers else "model"
    return load_config(
        None,
        [
            f'replay="{mode}"', f"steps={steps}", f"output={out / mode}", "model.path=tiny", "engine.kind=vllm",
            f'model.router_dtype="{router_dtype}"', "engine.dtype=bfloat16",
            f'engine.quantize="{"fp8" if fp8 else "none"}"', "engine.max_length=64",
            "engine.arguments.max_num_seqs=256", "environment.kind=arithmetic", "rollout.prompts=64",
            "rollout.group=8", "rollout.max_tokens=8", "optimizer.lr=5e-5", "optimizer.mini_batches=4",
            "trainer.max_tokens=4096", "checkpoint.every=0", "logging.tensorboard=false",
        ],
    )  # fmt: skip


def run_demo(
    out: pathlib.Path, steps: int = 25, fp8: bool = False, float32_routers: bool = False
) -> tuple[list[Row], list[str]]:
    """Train with replay off and with R3, and write `report.html` and its JSON. Return the table and the findings.

    `fp8` rounds the engine's weights, and `float32_routers` computes the engine's routers in float32, as the trainer
    does.
    """
    check_library()  # before the runs, not after them
    with hold(out):
        for mode in MODES:  # check both folders before the first run is trained
            _clear(out / mode)
        for mode in MODES:
            train(demo_config(mode, out, steps, fp8, float32_routers))
    runs = [Run("replay off", out / "off"), Run("R3", out / "r3")]
    rows = comparison(runs)
    notes = findings(rows, fp8, float32_routers)
    write_report(runs, out / "report.html", "Router Replay: off against R3", notes)
    return rows, notes


def _clear(folder: pathlib.Path) -> None:
    """Remove the run of an earlier demo; refuse a folder that something else wrote or writes to."""
    if folder.exists() and any(path.name != LOCK for path in folder.iterdir()) and not (folder / MARK).exists():
        raise ConfigError(f"{folder} contains files that no demo wrote: give another --out, or move them away")
    with hold(folder):
        (folder / MARK).touch()
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (LOCK, MARK):
                path.unlink()


def findings(rows: list[Row], fp8: bool = False, float32_routers: bool = False) -> list[str]:
    """Return sentences that say what the two runs show and what they do not show."""
    off, r3 = rows
    notes = []
    if off.k3_first and r3.k3_first:
        fall = off.k3_first / r3.k3_first
        notes.append(f"At the first step, on the same rollouts, R3 makes the k3 KL {fall:.1f} times smaller.")
        if not fp8 and not float32_routers:  # the promise is for the plain demo
            than = "at least" if fall >= PROMISED_FALL else "less than"
            notes[-1] = notes[-1][:-1] + f": {than} the factor of {PROMISED_FALL:g} that we promise."
    if off.extreme_mean is not None and r3.extreme_mean is not None:
        notes.append(
            f"Tokens whose probabilities differ by more than a factor 2: {off.extreme_mean:.3%} of all without replay, "
            f"{r3.extreme_mean:.3%} with it."
        )
    if off.reward_last is not None and r3.reward_last is not None:
        gap = r3.reward_last - off.reward_last
        notes.append(
            f"The reward ends {abs(gap):.2f} {'higher' if gap > 0 else 'lower'} with R3."
            if abs(gap) > LEAST_REWARD_GAP
            else "The reward curves differ by noise only: a model of this size does not collapse without replay. "
            "What replay repairs here is the gap between engine and trainer."
        )
    if fp8:
        notes.append(
            "The engine ran on weights rounded to FP8 blocks; replay repairs only the gap that routing causes."
        )
    if float32_routers:
        notes.append("The engine computed its routers in float32, as the trainer does, and all else in bfloat16.")
    notes.append(
        "The runs came one after the other, so their times also depend on the other load of the machine; "
        "python -m bench.train measures the cost of replay side by side."
    )
    return notes
