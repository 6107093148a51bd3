"""Compare the asynchronous with the synchronous loop for real: the same number of trained episodes, side by side.

    python -m bench.async_real                   # the tiny model on the CPU
    python -m bench.async_real --device cuda
    python -m bench.async_real --set engine.kind=vllm --set rollout.max_tokens=64
    python -m bench.async_real --device cuda --size gpu --pairs 1     # 446M parameters; about 4 minutes on an H200
    python -m bench.async_real --size check --steps 2 --pairs 1       # a check that all of this runs, on the CPU

Both loops train the same model with the same settings, in a process each, in alternation. The time of a run is the sum
of its steps' times after the first two, in which threads and kernels start.

`--size gpu` trains the model of `router-replay make-model --size gpu` with random weights, in bfloat16, with vLLM and
the trainer on one GPU. A step has 48 problems with 8 episodes, of which `bench/random_lengths.py` rewards the tokens.
Answers have 290 tokens on average and 768 at most, so that the synchronous loop waits for a few long ones. The
asynchronous loop may train tokens of the last five versions and has at most 512 episodes in progress, which is what the
engine computes at once. The goal is that new weights take at most 5 % of an asynchronous step.

After every run it prints the medians of its steps, with the smallest and the largest. The time of a step is taken here,
from one line of metrics.jsonl to the next: `seconds/step` ends before the metrics are computed and written, and before
the garbage collection, so `sync/share_of_step` is rather too large than too small.

vLLM keeps its compiled code in VLLM_CACHE_ROOT, by default ~/.cache/vllm. All runs use the same folder, and "started
after" shows that the later ones find it there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.train_gpu import HERE, make_model
from router_replay.rl.log.metrics import METRICS_FILE, read_metrics

WARM_UP = 2
GOAL = 0.05  # of an asynchronous step, for new weights
TICK = 0.01  # seconds between two looks at the metrics of a run


@dataclasses.dataclass(frozen=True)
class Size:
    """Hold the settings of both runs, those of the asynchronous one alone, and those of vLLM on a GPU."""

    both: tuple[str, ...]
    asynchronous: tuple[str, ...] = ()
    vllm_on_gpu: tuple[str, ...] = ()
    vocabulary: int = 0
    """Of a model with random weights that is made for the runs; 0: none is made."""


SIZES = {
    "tiny": Size(
        ("model.path=tiny", "rollout.prompts=16", "rollout.group=8", "rollout.max_tokens=24", "environment.digits=3")
    ),
    "gpu": Size(
        (
            "model.dtype=bfloat16", "engine.dtype=bfloat16", "engine.max_length=800", "trainer.max_tokens=16384",
            "rollout.prompts=48", "rollout.group=8", "rollout.max_tokens=768", "optimizer.lr=1e-6",
        ),
        ("asynchronous.max_staleness=4", "asynchronous.max_in_flight=512"),
        # In the trainer's process vLLM computes at most 128 requests and 2,048 tokens at once by default. The KV of 512
        # answers takes 6.1 GiB, and the trainer about 24 GiB.
        (
            "engine.arguments.gpu_memory_utilization=0.25", f"engine.arguments.kv_cache_memory_bytes={8 << 30}",
            "engine.arguments.max_num_seqs=512", "engine.arguments.max_num_batched_tokens=8192",
        ),
        256,
    ),
    "check": Size(
        (
            "model.dtype=bfloat16", "engine.dtype=bfloat16", "engine.max_length=128", "trainer.max_tokens=2048",
            "rollout.prompts=4", "rollout.group=4", "rollout.max_tokens=96", "optimizer.lr=1e-6",
        ),
        ("asynchronous.max_staleness=4", "asynchronous.max_in_flight=24"),
        ("engine.arguments.gpu_memory_utilization=0.25", "engine.arguments.max_num_seqs=32"),
        32,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """Hold what a run measured: its lines of metrics, and the seconds from its start at which each was there."""

    lines: list[dict[str, Any]]
    times: list[float]

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Return the lines after the warm-up."""
        return self.lines[WARM_UP:]

    @property
    def step_seconds(self) -> list[float]:
        """Return the seconds from line to line after the warm-up."""
        return [after - before for before, after in zip(self.times[WARM_UP - 1 :], self.times[WARM_UP:], strict=False)]

    @property
    def per_token(self) -> list[float]:
        """Return the microseconds per trained token of each step after the warm-up."""
        return [1e6 * seconds / line["tokens"] for seconds, line in zip(self.step_seconds, self.measured, strict=True)]

    def total(self, name: str) -> float:
        """Return the sum of a metric after the warm-up."""
        return float(sum(line[name] for line in self.measured))

    def mean(self, name: str) -> float:
        """Return the mean of a metric after the warm-up; 0 if the loop does not have it."""
        return statistics.mean(line.get(name, 0.0) for line in self.measured)

    def all(self, name: str) -> list[float]:
        """Return a metric of each step after the warm-up."""
        return [float(line[name]) for line in self.measured]


def run(loop: str, settings: list[str], on_step: Callable[[int, dict[str, Any], float], object]) -> Found:
    """Train once. `on_step` gets the number of each step, its metrics, and the time at which they were there."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    variables.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its kernels are compiled, and not every machine can
    with tempfile.TemporaryDirectory() as folder:
        output, log = pathlib.Path(folder, "run"), pathlib.Path(folder, "log")
        words = [word for setting in [*settings, f"loop={loop}", f"output={output}"] for word in ("--set", setting)]
        command = [sys.executable, "-m", "router_replay.cli", "train", *words]
        started, times = time.perf_counter(), list[float]()
        with log.open("w") as said, ended(subprocess.Popen(command, stdout=said, stderr=said, env=variables)) as child:
            over = False
            while not over:
                over = child.poll() is not None  # asked before the lines are counted, so that none is missed
                while len(times) < lines_in(output):
                    times.append(time.perf_counter() - started)
                    on_step(len(times), read_metrics(output)[len(times) - 1], times[-1])
                time.sleep(TICK)
        if child.returncode:
            raise RuntimeError(f"the {loop} run failed:\n{log.read_text()[-3000:]}")
        return Found(read_metrics(output), times)


def lines_in(output: pathlib.Path) -> int:
    """Return how many steps of a run have written their metrics."""
    try:
        return (output / METRICS_FILE).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the process if the block fails."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def spread(values: Sequence[float], form: str) -> str:
    """Return the median in words, with the smallest and the largest value."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def show_run(loop: str, found: Found, goal: float | None) -> bool:
    """Print the medians of a run; return whether it missed the goal."""
    outside = 1 - found.total("seconds/step") / sum(found.step_seconds)
    print(
        f"{loop}: started after {found.times[0] - found.lines[0]['seconds/step']:.0f} s; step median "
        f"{spread(found.step_seconds, '.2f')} s, {outside:.1%} of it after seconds/step; per trained token median "
        f"{spread(found.per_token, '.1f')} us; rollout {statistics.median(found.all('seconds/rollout')):.2f} s, score "
        f"{statistics.median(found.all('seconds/score')):.2f} s, update "
        f"{statistics.median(found.all('seconds/update')):.2f} s, answers of "
        f"{statistics.median(found.all('response_length')):.0f} tokens",
        flush=True,
    )
    if loop == "sync":
        return False
    share = statistics.median(found.all("sync/share_of_step"))
    missed = goal is not None and share > goal
    verdict = "" if goal is None else f" (goal at most {goal:.0%}): {'MISSED' if missed else 'kept'}"
    direct = "by CUDA IPC" if min(found.all("sync/cuda_ipc")) == 1 else "not by CUDA IPC"
    print(
        f"async: new weights, {direct}, take median {spread(found.all('seconds/sync'), '.3f')} s; sync/share_of_step "
        f"median {spread(found.all('sync/share_of_step'), '.1%')}{verdict}\n"
        f"async: trainer idle median {spread(found.all('async/trainer_idle'), '.0%')}, engine idle median "
        f"{spread(found.all('async/engine_idle'), '.0%')}, age of tokens mean {found.mean('async/staleness_mean'):.1f} "
        f"and at most {max(found.all('async/staleness_max')):.0f}, per step {found.mean('async/tokens_resumed'):,.0f} "
        f"tokens resumed and {found.mean('async/tokens_wasted'):,.0f} wasted, in all "
        f"{found.lines[-1]['episodes/dropped_stale']:.0f} episodes dropped as too old",
        flush=True,
    )
    return missed


def settings_of(size: Size, arguments: argparse.Namespace, model: pathlib.Path) -> list[str]:
    """Return the settings of both runs."""
    kind = arguments.engine or ("vllm" if size.vocabulary else "embedded")
    own = []
    if size.vocabulary:
        own = [f"model.path={model}", "environment.kind=bench.random_lengths:RandomLengths"]
        own += [f"environment.arguments.vocabulary={size.vocabulary}"]
    if kind == "vllm" and arguments.device == "cuda":
        own += size.vllm_on_gpu
    return [
        f"model.device={arguments.device}", f"steps={arguments.steps + WARM_UP}", f"engine.kind={kind}", *size.both,
        *own, "loss.truncated_importance=2", "checkpoint.every=0", "logging.tensorboard=false", *arguments.set,
    ]  # fmt: skip


def main() -> int:
    """Print the ratio of each pair of runs, and their median; return 1 if new weights took too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="check: --size gpu with a tiny model, as a test")
    parser.add_argument("--engine", choices=["embedded", "vllm"], help="vllm by default, but embedded for --size tiny")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=["sync", "async"], help="run one loop alone, without a comparison")
    parser.add_argument("--steps", type=int, help=f"after {WARM_UP} for the warm-up; 8 by default, 5 for --size gpu")
    parser.add_argument("--set", action="append", default=[], help="a setting of both runs")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (5 if arguments.size == "gpu" else 8)
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments, SIZES[arguments.size], pathlib.Path(folder, "model"))


def measure(arguments: argparse.Namespace, size: Size, model: pathlib.Path) -> int:
    """Make the model and run the pairs."""
    if size.vocabulary:
        _, parameters = make_model(model, tiny=arguments.size != "gpu", vocabulary=size.vocabulary)
        torch.cuda.empty_cache()  # the runs need the memory; without a GPU this does nothing
        print(f"{parameters / 1e6:.0f}M parameters, {arguments.steps} steps after {WARM_UP}", flush=True)
    settings, goal = settings_of(size, arguments, model), GOAL if arguments.size == "gpu" else None

    def once(loop: str) -> Found:
        def on_step(number: int, line: dict[str, Any], at: float) -> None:
            if size.vocabulary:  # a step takes seconds
                print(
                    f"    {loop} step {number} of {arguments.steps + WARM_UP} at {at:6.1f} s: "
                    f"{line['seconds/step']:.2f} s, {line['tokens']:,.0f} tokens, "
                    f"new weights {line['seconds/sync']:.3f} s",
                    flush=True,
                )

        return run(loop, [*settings, *(size.asynchronous if loop == "async" else ())], on_step)

    if arguments.only:
        return int(show_run(arguments.only, once(arguments.only), goal))
    ratios, of_medians, missed = list[float](), list[float](), False
    for pair in range(arguments.pairs):
        found = dict[str, Found]()
        for loop in ["sync", "async"] if pair % 2 == 0 else ["async", "sync"]:
            found[loop] = once(loop)
            missed |= show_run(loop, found[loop], goal)
        sync, beside = found["sync"], found["async"]
        seconds = {loop: one.total("seconds/step") for loop, one in found.items()}
        tokens = {loop: one.total("tokens") for loop, one in found.items()}
        ratio = (seconds["async"] / tokens["async"]) / (seconds["sync"] / tokens["sync"])
        ratios.append(ratio)
        of_medians.append(statistics.median(beside.per_token) / statistics.median(sync.per_token))
        print(
            f"sync {seconds['sync']:6.1f} s, {tokens['sync']:,.0f} tokens   async {seconds['async']:6.1f} s, "
            f"{tokens['async']:,.0f} tokens   per token {ratio:.2f}   trainer waits "
            f"{beside.mean('async/trainer_idle'):.0%}, engine idle {beside.mean('async/engine_idle'):.0%}",
            flush=True,
        )
        print(
            f"per trained token, median of the steps: sync {spread(sync.per_token, '.1f')} us   async "
            f"{spread(beside.per_token, '.1f')} us   async / sync {of_medians[-1]:.2f}",
            flush=True,
        )
    print(f"{arguments.device}: asynchronous / synchronous time per trained token: median {spread(ratios, '.2f')}")
    print(f"{arguments.device}: the same, of the medians of the steps: median {spread(of_medians, '.2f')}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
