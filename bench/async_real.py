"""Compare the asynchronous with the synchronous loop for real: the same number of trained episodes, side by side.

    python -m bench.async_real                   # the tiny model on the CPU
    python -m bench.async_real --device cuda
    python -m bench.async_real --set engine.kind=vllm --set rollout.max_tokens=64

Both loops train the same model with the same settings, in a process each, in alternation. The time of a run is the sum
of its steps' times after the first two, in which threads and kernels start.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile

from router_replay.rl.log.metrics import read_metrics

WARM_UP = 2


def run(loop: str, output: pathlib.Path, settings: list[str]) -> dict[str, float]:
    """Train once; return the seconds, the tokens, and what the trainer and the engine waited."""
    words = [word for setting in [*settings, f"loop={loop}", f"output={output}"] for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "router_replay.cli", "train", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the {loop} run failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    lines = read_metrics(output)[WARM_UP:]
    return {
        "seconds": sum(line["seconds/step"] for line in lines),
        "tokens": sum(line["tokens"] for line in lines),
        "trainer_idle": statistics.mean(line.get("async/trainer_idle", 0.0) for line in lines),
        "engine_idle": statistics.mean(line.get("async/engine_idle", 0.0) for line in lines),
    }


def main() -> int:
    """Print the ratio of each pair of runs, and their median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], help="a setting of both runs")
    arguments = parser.parse_args()
    settings = [
        "model.path=tiny", f"model.device={arguments.device}", f"steps={arguments.steps + WARM_UP}",
        "rollout.prompts=16", "rollout.group=8", "rollout.max_tokens=24", "environment.digits=3",
        "loss.truncated_importance=2", "checkpoint.every=0", "logging.tensorboard=false", *arguments.set,
    ]  # fmt: skip
    ratios = []
    for pair in range(arguments.pairs):
        order = ["sync", "async"] if pair % 2 == 0 else ["async", "sync"]
        with tempfile.TemporaryDirectory() as folder:
            found = {loop: run(loop, pathlib.Path(folder) / loop, settings) for loop in order}
        sync, beside = found["sync"], found["async"]
        ratio = (beside["seconds"] / beside["tokens"]) / (sync["seconds"] / sync["tokens"])
        ratios.append(ratio)
        print(
            f"sync {sync['seconds']:6.1f} s, {sync['tokens']:,.0f} tokens   async {beside['seconds']:6.1f} s, "
            f"{beside['tokens']:,.0f} tokens   per token {ratio:.2f}   trainer waits {beside['trainer_idle']:.0%}, "
            f"engine idle {beside['engine_idle']:.0%}",
            flush=True,
        )
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{arguments.device}: asynchronous / synchronous time per trained token: median {spread}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
