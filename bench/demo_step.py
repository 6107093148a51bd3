"""Measure a whole step of the demo on the CPU against commit 1b089bf, in turns.

    python -m bench.demo_step                        # the demo's settings: vLLM in process, 64 x 8 episodes
    python -m bench.demo_step --engine embedded      # without vLLM

Each turn trains a few steps in a process of its own. The first step of a turn is left out: it contains what happens
once. The figure is the median over all other steps, by phase; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from bench.train_gpu import BASE, HERE, base_source
from router_replay.run_files import read_metrics

LIMIT = 0.65
PHASES = ("rollout", "reward", "score", "update", "sync", "step")
PROGRAM = """
import importlib, json, sys
def first_of(*names):
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(names)
if __name__ == "__main__":
    config = importlib.import_module("router_replay.rl.config")
    loop = first_of("router_replay.rl.loop.train", "router_replay.rl.sync_loop")
    loop.train(config.load_config(None, json.loads(sys.argv[1])))
"""
# vLLM finds the plugin by its entry point; the installed package has that of the new version.
OLD_PLUGIN = "[vllm.general_plugins]\nrouter_replay = router_replay.engines.vllm_plugin:register\n"


def settings(engine: str, steps: int, output: pathlib.Path) -> list[str]:
    """Return the settings of `recipes/tiny/demo.py`."""
    return [
        "replay=r3", f"steps={steps}", f"output={output}", "model.path=tiny", f"engine.kind={engine}",
        "engine.dtype=bfloat16", "engine.max_length=64", "environment.kind=arithmetic", "rollout.prompts=64",
        "rollout.group=8", "rollout.max_tokens=8", "optimizer.lr=5e-5", "optimizer.mini_batches=4",
        "trainer.max_tokens=4096", "checkpoint.every=0", "logging.tensorboard=false",
        *(["engine.arguments.max_num_seqs=256"] if engine == "vllm" else []),
    ]  # fmt: skip


def turn(source: pathlib.Path, program: pathlib.Path, engine: str, steps: int) -> list[dict[str, float]]:
    """Train in a process of its own with the package in `source`; return the metrics of all steps but the first."""

    with tempfile.TemporaryDirectory() as output:
        given = json.dumps(settings(engine, steps, pathlib.Path(output) / "run"))
        variables = {**os.environ, "PYTHONPATH": str(source)}
        subprocess.run([sys.executable, str(program), given], env=variables, check=True, stdout=subprocess.DEVNULL)
        return read_metrics(pathlib.Path(output) / "run")[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "embedded"])
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--base", help=f"a folder that holds the package router_replay of {BASE}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        base = base_source(arguments.base, root / "base")
        if base is None:
            return 1
        metadata = base / "router_replay-0.1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: router-replay\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text(OLD_PLUGIN)
        program = root / "turn.py"
        program.write_text(PROGRAM)
        sources = {BASE: base, "new": HERE / "src"}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
        for number in range(arguments.turns):
            for name in list(sources)[:: 1 if number % 2 else -1]:
                taken[name] += turn(sources[name], program, arguments.engine, arguments.steps)
    print(f"\nA step of the demo, seconds, median of {len(taken['new'])} steps, engine {arguments.engine}\n")
    print("| phase |", " | ".join(sources), "| ratio |\n| --- | ---: | ---: | ---: |")
    for phase in PHASES:
        medians = [statistics.median(line[f"seconds/{phase}"] for line in taken[name]) for name in sources]
        print(f"| {phase} | {medians[0]:.3f} | {medians[1]:.3f} | {medians[1] / max(medians[0], 1e-9):.2f}x |")
    missed = medians[1] > LIMIT * medians[0]
    print(f"\na step takes {medians[1] / medians[0]:.2f}x (limit {LIMIT}x): {'MISSED' if missed else 'kept'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
