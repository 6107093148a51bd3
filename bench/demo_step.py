"""Measure a whole step of the demo (vLLM and the trainer, R3) against commit 1b089bf, in turns in one run.

    git archive 1b089bf src setup.py pyproject.toml README.md LICENSE | tar x -C FOLDER
    (cd FOLDER && python setup.py build_ext --inplace egg_info)    # its kernel, and the entry point of its vLLM plugin
    python -m bench.demo_step --base FOLDER

Each version is a process of its own with its own engine. In each round both run one step, one after the other, in
alternating order; the one that does not run waits. Ratios are medians over rounds of the ratio within a round, with a
bootstrap interval. The CPU seconds of trainer and engine stand beside the wall time, because they depend less on other
load. `--base` may also be a checkout of another version, and `--rounds 2` is a check that all of it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from bench.train_step import MARK
from bench.verdicts import LEAST_ROUNDS, Share

GOAL = 0.65
HERE = pathlib.Path(__file__).resolve().parent.parent
PHASES = ("rollout", "reward", "score", "update", "sync")
PARTS = ("step", *PHASES, "all else", "step, CPU", "trainer, CPU", "engine, CPU")


class Version:
    """A process that runs the demo with the package in `source`, step by step."""

    def __init__(self, name: str, source: pathlib.Path, out: pathlib.Path, steps: int) -> None:
        self.name = name
        self._log = out.parent / f"{out.name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "bench" / "demo_worker.py"), str(out), str(steps)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=source, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(HERE)])},
            )  # fmt: skip
        self._unread = b""

    def step(self, limit: float) -> dict[str, float]:
        """Run one step and return its figures. Raises RuntimeError if it takes more than `limit` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        found = self._answer(time.monotonic() + limit)
        found["all else"] = found["step"] - sum(found[phase] for phase in PHASES)
        return found

    def _answer(self, until: float) -> dict[str, float]:
        """Read lines until one begins with MARK."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._unread.partition(b"\n")
                if newline:
                    self._unread = rest
                    if line.startswith(MARK.encode()):
                        return dict(json.loads(line.removeprefix(MARK.encode())))
                    continue
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise RuntimeError(f"{self.name}: no answer in time\n{self._end_of_log()}")
                more = os.read(self._process.stdout.fileno(), 65536)
                if not more:
                    raise RuntimeError(f"{self.name}: ended with {self._process.wait()}\n{self._end_of_log()}")
                self._unread += more

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def close(self, limit: float) -> None:
        """Let the process end within `limit` seconds, or end it with its engine."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="a checkout of 1b089bf with its kernel and egg-info (see above)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before; the first one starts the engines")
    parser.add_argument("--limit", type=float, default=120.0, help="the most seconds that one step may take")
    parser.add_argument("--start-limit", type=float, default=600.0, help="the most seconds for an engine's start")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures of every step to this JSON lines file")
    arguments = parser.parse_args()
    base = pathlib.Path(arguments.base).resolve() / "src"
    if not any(base.glob("*.egg-info")):
        parser.error(f"{base} has no egg-info, so vLLM would not find its plugin: run setup.py as the help says")
    steps = arguments.warm_up + arguments.rounds
    taken: dict[str, list[dict[str, float]]] = {"base": [], "new": []}
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        versions = [Version("base", base, root / "base", steps), Version("new", HERE / "src", root / "new", steps)]
        patience = 0.0  # after a failure nothing is waited for
        try:
            for number in range(steps):
                for version in versions if number % 2 else versions[::-1]:
                    found = version.step(arguments.limit if number else arguments.start_limit)
                    note(version.name, number, found, arguments)
                    if number >= arguments.warm_up:
                        taken[version.name].append(found)
            patience = 60.0
        finally:
            for version in versions:
                version.close(patience)
    return show(taken["base"], taken["new"])


def note(name: str, number: int, found: dict[str, float], arguments: argparse.Namespace) -> None:
    """Print and write the figures of one step at once, so that a run that is stopped still has them."""
    warm = " (warm-up)" if number < arguments.warm_up else ""
    parts = ", ".join(f"{part} {found[part]:.2f}" for part in PARTS)
    print(f"round {number}{warm}, {name}: {parts}", flush=True)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(json.dumps({"version": name, "round": number, **found}) + "\n")


def show(base: list[dict[str, float]], new: list[dict[str, float]]) -> int:
    """Print the table and the verdict; return 1 if the goal is missed."""
    tokens = statistics.median(one["tokens"] for one in new)
    print(f"\nA step of the demo, {tokens:,.0f} tokens, median of {len(new)} rounds\n")
    print("| part | 1b089bf, s | now, s | share of the step now | ratio of the times |")
    print("| --- | ---: | ---: | ---: | ---: |")
    ratios: dict[str, tuple[float, float, float]] = {}
    for part in PARTS:
        before, after = ([one[part] for one in rounds] for rounds in (base, new))
        share = Share.of([max(1e-9, value) for value in after], [max(1e-9, value) for value in before])
        ratios[part] = share.median, share.low, share.high
        of_step = statistics.median(one[part] / one["step, CPU" if "CPU" in part else "step"] for one in new)
        print(
            f"| {part} | {statistics.median(before):.3f} | {statistics.median(after):.3f} | {of_step:.0%} | "
            f"{share.median:.2f}x [{share.low:.2f}, {share.high:.2f}] |"
        )
    middle, low, high = ratios["step"]
    if len(new) < LEAST_ROUNDS:
        verdict = f"no verdict: {len(new)} rounds, at least {LEAST_ROUNDS} are needed"
    elif high <= GOAL:
        verdict = "kept"
    elif low > GOAL:
        verdict = "MISSED"
    else:
        verdict = "no verdict: the goal lies in the interval. Run more rounds"
    print(f"\na step takes {middle:.2f}x of the time at 1b089bf (goal {GOAL}x): {verdict}")
    return int(verdict == "MISSED")


if __name__ == "__main__":
    sys.exit(main())
