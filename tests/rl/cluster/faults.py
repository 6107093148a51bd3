"""Reward functions that kill a process of their own run, once: they run in the first rank, in the middle of a step.

`FAULTS` names a folder. A function kills at its `AT`-th call over all processes of the run, and writes there which
engines it saw.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

import ray

from tests.rl.rewards import sevens

AT = 20  # a step has 12 episodes


def kill_engine(prompt: str, completion: str, answer: str) -> float:
    if _is_time():
        os.kill(_pid_of("engine0"), signal.SIGKILL)
    return sevens(prompt, completion, answer)


def kill_first_rank(prompt: str, completion: str, answer: str) -> float:
    if _is_time():
        os.kill(os.getpid(), signal.SIGKILL)
    return sevens(prompt, completion, answer)


def kill_other_rank(prompt: str, completion: str, answer: str) -> float:
    if _is_time():
        [other] = [pid for pid in _ranks() if pid != os.getpid()]
        os.kill(other, signal.SIGKILL)
    return sevens(prompt, completion, answer)


def _is_time() -> bool:
    folder = pathlib.Path(os.environ["FAULTS"])
    with (folder / "calls").open("a") as file:
        file.write(".")
    calls = (folder / "calls").stat().st_size
    if calls % 12 == 1:
        pids = [_pid_of(name) for name in ("engine0", "engine1")]
        with (folder / "engines").open("a") as file:
            file.write(f"{pids}\n")
    return calls == AT


def _pid_of(name: str) -> int:
    while True:
        try:
            return int(ray.get(ray.get_actor(name).where.remote())[1])
        except ray.exceptions.ActorUnavailableError:  # Ray starts it again
            time.sleep(0.1)


def _ranks() -> list[int]:
    """The trainer ranks that the raylet of this process started."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and b"RankActor" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found
