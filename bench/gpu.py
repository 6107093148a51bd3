"""Run the benchmarks of one GPU one after the other, and print which of them kept their goals.

    make bench-gpu                                        # all of them, about 40 minutes
    python -m bench.gpu --only replay follow --minutes 9

Every benchmark is a process of its own with a time limit, and OUT/NAME.log has what it printed so far, so that a run
that is stopped keeps what it measured. Benchmarks of a package that is not installed are left out, and so are those for
which --minutes leaves too little time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE = 15.0  # seconds that a benchmark has to end its own processes when its time is over


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A command (the words after `python -m`) with its limit in minutes, and the package that it needs beside ours."""

    name: str
    command: str
    minutes: float
    needs: str = "torch"


BENCHMARKS = (
    Benchmark("replay", "bench.replay --device cuda --rounds 15", 2),
    Benchmark("follow", "bench.follow --device cuda --rounds 40", 2),
    Benchmark("attention", "bench.attention --device cuda", 2),
    Benchmark("train", "bench.train_gpu --rounds 12", 4),
    Benchmark("train_compiled", "bench.train_gpu --compile --rounds 8", 6),
    Benchmark("megatron", "bench.megatron_gpu --rounds 10", 4, "megatron"),
    Benchmark("weights", "bench.weights --device cuda --ipc", 5, "vllm"),
    Benchmark("loops", "bench.async_real --device cuda --size gpu --pairs 1", 6, "vllm"),
    Benchmark("engine_start", "bench.engine_start --skip-defaults", 6, "vllm"),
    Benchmark("engines", "bench.engines --seconds 420", 10, "vllm"),
)


def run(benchmark: Benchmark, out: pathlib.Path) -> str:
    """Run one benchmark; return "kept", "MISSED", "not finished" or "failed", as its exit status says."""
    with (out / f"{benchmark.name}.log").open("w") as log:
        command = [sys.executable, "-m", *shlex.split(benchmark.command)]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        try:
            status = process.wait(benchmark.minutes * 60)
        except subprocess.TimeoutExpired:
            return "not finished"
        finally:
            _end(process)
    return {0: "kept", 1: "MISSED"}.get(status, f"failed with status {status}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a benchmark, engines among them: the next one needs their GPU memory."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + GRACE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
    process.wait()


def main(arguments: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> int:
    """Print a line for each benchmark; return 1 unless all that ran kept their goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in benchmarks], help="leave out the others")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all of them together")
    parser.add_argument("--base", help="of bench.train_gpu, for a copy of the project without git")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/bench_gpu"), help="a folder for the logs")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + 60 * chosen.minutes, list[str]()
    for one in benchmarks:
        if chosen.only and one.name not in chosen.only:
            continue
        if chosen.base and one.command.startswith("bench.train_gpu"):
            one = dataclasses.replace(one, command=f"{one.command} --base {shlex.quote(chosen.base)}")
        started = time.monotonic()
        if importlib.util.find_spec(one.needs) is None:
            found = f"left out: {one.needs} is not installed"
        elif started + 60 * one.minutes > end:
            found = f"left out: it may take {one.minutes:g} minutes, and {max(0.0, end - started) / 60:.1f} are left"
        else:
            found = run(one, chosen.out)
            results.append(found)
        print(f"{one.name:<16} {time.monotonic() - started:6.0f} s   {found}", flush=True)
    print(f"what they printed is in {chosen.out}")
    return int(not results or any(found != "kept" for found in results))


if __name__ == "__main__":
    raise SystemExit(main())
