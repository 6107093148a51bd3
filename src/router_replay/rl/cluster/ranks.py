"""Run one trainer rank in a Ray actor: the code of any other rank, in the environment that torchrun would set."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time

import ray

from router_replay.rl.config import TrainConfig
from router_replay.rl.state.checkpoints import Progress

END_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an actor runs: its Ray `node`, the `address` of this machine, its process, and a `port` that was free."""

    node: str
    address: str
    pid: int
    port: int


class RankActor:
    """Hold trainer rank number `rank` of `world`. Ray calls its methods in the main thread, where signals arrive."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def place(self) -> Place:
        """Return where this rank runs. The ranks meet at the address and the port of the first one."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid(), port)

    def train(self, config: TrainConfig, resume: bool, first: Place, folder: str) -> Progress:
        """Run this rank to the end of the run.

        `resume` continues from the newest checkpoint, `first` is the place of the first rank, and `folder` is the
        driver's current folder, to which paths of `config` may be relative.
        """
        from router_replay.rl.loop.train import train

        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_RANK": "0",  # Ray shows each rank its own GPU only
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
        }
        with contextlib.suppress(FileNotFoundError):  # another machine need not have it
            os.chdir(folder)
        return train(config, resume=resume)


def end_process(pid: int) -> None:
    """Kill a process of this machine and wait until it has ended, so that the kernel has released its locks."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def interrupt_process(pid: int) -> None:
    """Send SIGINT to a process of this machine, as Ctrl-C does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
