"""Reward functions that kill a process of their own run, once: they run in the first rank, in the middle of a step.

`FAULTS` names a folder. A function kills at its `AT`-th call over all processes of the run, and writes there which
engines it saw.
"""

from __future__ import annotations

import math
import os
import pathlib
import signal
import time

import numpy as np
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


def note_nodes(prompt: str, completion: str, answer: str) -> float:
    """Kill nothing, and write on how many nodes the first rank and the engines run."""
    nodes = {ray.get(ray.get_actor(name).where.remote())[0] for name in ("engine0", "engine1")}
    nodes.add(ray.get_runtime_context().get_node_id())
    pathlib.Path(os.environ["FAULTS"], "nodes").write_text(str(len(nodes)))
    return sevens(prompt, completion, answer)


def note_store(prompt: str, completion: str, answer: str) -> float:
    """Kill nothing, and write at the start of each step how many bytes of the object store are in use.

    The raylets report it with a delay, and so late are references dropped. The first step waits until the number stays,
    and of the others the lowest number within a while counts.
    """
    if _count() % 12 == 1:
        seen, deadline = _settled_use(), time.monotonic() + 120
        while time.monotonic() < deadline and seen > _first_use():
            time.sleep(0.2)
            seen = min(seen, _used())
        with pathlib.Path(os.environ["FAULTS"], "store").open("a") as file:
            file.write(f"{seen}\n")
    return sevens(prompt, completion, answer)


def fill_store(prompt: str, completion: str, answer: str) -> float:
    """Kill nothing, and hold more objects in use than the store has room for; Ray can move none of them."""
    if not _held:
        for _ in range(3):
            reference = ray.put(np.zeros(30 << 20, np.uint8))
            _held.append((reference, ray.get(reference)))
    free = int(ray.available_resources().get("object_store_memory", 0))
    with pathlib.Path(os.environ["FAULTS"], "free").open("a") as file:
        file.write(f"{free}\n")
    return sevens(prompt, completion, answer)


_held: list[tuple[ray.ObjectRef, np.ndarray]] = []


def _used() -> int:
    return int(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])


def _settled_use(seconds: float = 5.0) -> int:
    """The use of the store, once it has been the same for some seconds and is not nothing."""
    seen, since = _used(), time.monotonic()
    while not seen or time.monotonic() - since < seconds:
        time.sleep(0.2)
        if (now := _used()) != seen:
            seen, since = now, time.monotonic()
    return seen


def _first_use() -> float:
    """The number that the first step wrote, and a little more: answers differ in length."""
    file = pathlib.Path(os.environ["FAULTS"], "store")
    return 1.3 * int(file.read_text().split()[0]) if file.exists() else math.inf


def _count() -> int:
    folder = pathlib.Path(os.environ["FAULTS"])
    with (folder / "calls").open("a") as file:
        file.write(".")
    return (folder / "calls").stat().st_size


def _is_time() -> bool:
    folder, calls = pathlib.Path(os.environ["FAULTS"]), _count()
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
