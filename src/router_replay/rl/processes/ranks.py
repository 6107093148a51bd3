"""Describe which process this is, and how the processes of a run share the work.

`torchrun --nproc-per-node N` starts N processes; without it there is one. With Ulysses over P, ranks
[0, P) share each sequence of the first replica, [P, 2P) those of the second, and so on. With Megatron, tensor parallel
ranks are neighbours in the same way, and each pipeline stage holds one such block of all replicas.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.processes.watch import NoWatch, Watch

# The timeout of one collective. The other ranks wait in one while the first rank plays rollouts. The watch sees whether
# the first rank makes progress, and ends a run that hangs long before this.
PATIENCE = datetime.timedelta(hours=12)
_runs = itertools.count()  # the runs of this process so far; one store can serve several runs


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Describe this process, number `rank` of `world`. `ulysses` ranks share each sequence.

    `group` is the process group of the ranks that share this rank's sequences, or None if nothing is shared. With
    Megatron, `tensor` ranks hold the parts of a layer, and `pipeline` ranks hold the stages of a model.
    """

    rank: int
    world: int
    ulysses: int
    device: torch.device
    group: Any = None
    watch: Watch | NoWatch = dataclasses.field(default_factory=NoWatch)
    tensor: int = 1
    pipeline: int = 1

    @property
    def replicas(self) -> int:
        """Return the number of groups of ranks that each work on sequences of their own."""
        return self.world // (self.ulysses * self.tensor * self.pipeline)

    @property
    def piece(self) -> int:
        """Return this rank's number among those of its replica."""
        return self.place_of(self.rank)[1]

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the replica of `rank`, and the number of `rank` among those of its replica.

        With Ulysses the number is that of its piece of the sequences.
        """
        neighbours = self.ulysses * self.tensor
        stage, rest = divmod(rank, neighbours * self.replicas)
        replica, neighbour = divmod(rest, neighbours)
        return replica, stage * neighbours + neighbour

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that has the engine, the environments and the files."""
        return self.rank == 0

    def scatter(self, parts: Sequence[bytes | bytearray] | None) -> bytes:
        """Send one message from the first rank to every rank; return the message for this rank."""
        if self.world == 1:
            assert parts is not None
            return bytes(parts[0])
        size = torch.zeros((), dtype=torch.int64)
        dist.scatter(size, None if parts is None else [torch.tensor(len(part)) for part in parts])
        if parts is None:
            mine = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(mine, src=0)
            return mine.numpy().tobytes()
        for rank, part in enumerate(parts[1:], start=1):
            dist.send(_as_tensor(part), dst=rank)
        return bytes(parts[0])

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the float32 arrays of all ranks on the first rank, and an empty list on the others.

        The shapes may differ in the last axis only.
        """
        if self.world == 1:
            return [values]
        lengths = torch.zeros(self.world, dtype=torch.int64)
        lengths[self.rank] = values.shape[-1]
        dist.all_reduce(lengths)
        mine = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        if not self.is_first:
            if mine.numel():
                dist.send(mine, dst=0)
            return []
        gathered = [mine, *(torch.empty(*values.shape[:-1], length) for length in lengths.tolist()[1:])]
        for rank, other in enumerate(gathered):
            if rank and other.numel():
                dist.recv(other, src=rank)
        return [one.numpy() for one in gathered]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks; it is computed in place. All ranks must call it."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any rank. All ranks must call it."""
        return bool(self.sum(torch.tensor(int(flag), device=self.device)).item())


def _as_tensor(message: bytes | bytearray) -> torch.Tensor:
    """Return a view of a writable message, or a copy of a read-only one."""
    return torch.frombuffer(message if isinstance(message, bytearray) else bytearray(message), dtype=torch.uint8)


def world_size() -> int:
    """Return the number of processes of this run, as torchrun set it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(config: TrainConfig) -> Ranks:
    """Join the other processes. A single process needs no process group, except for Megatron."""
    world, rank = world_size(), int(os.environ.get("RANK", "0"))
    device = _device(config.model.device)
    shared: dict[str, Any] = {"tensor": config.megatron.tensor_parallel, "pipeline": config.megatron.pipeline_parallel}
    if world == 1:
        if config.trainer.backend == "megatron":
            _join_alone(device)
        return Ranks(rank, world, config.trainer.ulysses, device, **shared)
    store = _store(config.trainer.rank_timeout)
    watch = Watch(_own_part(store), rank, world, config.trainer.rank_timeout)
    try:
        watch.phase("joining the other ranks")
        if not dist.is_initialized():
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world, timeout=PATIENCE)
        group = _ulysses_group(rank, world, config.trainer.ulysses)
    except BaseException as error:
        failure = watch.failed(error)
        watch.close()
        raise failure from None
    return Ranks(rank, world, config.trainer.ulysses, device, group, watch, **shared)


def _join_alone(device: torch.device) -> None:
    """Make the process group of a single process, which Megatron divides like any other."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _ulysses_group(rank: int, world: int, size: int) -> Any:
    """Return the group of ranks that share this rank's sequences, or None if they are not shared."""
    group = None
    for first in range(0, world, size) if size > 1 else ():  # every rank must take part in creating every group
        members = list(range(first, first + size))
        made = dist.new_group(members)
        group = made if rank in members else group
    return group


def leave(here: Ranks | None = None, failed: bool = False) -> None:
    """Leave the process group. After a failure the watch keeps running, since a broken group may hang here."""
    watch = NoWatch() if here is None else here.watch
    if not failed:
        watch.close()
    gc.collect()  # an object that still holds a group would end its threads late, while the interpreter shuts down
    if dist.is_initialized():
        dist.destroy_process_group()
    watch.close()


def _store(timeout: float) -> Any:
    """Return the run's store, provided by torchrun or the first rank."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    limit = datetime.timedelta(seconds=timeout)
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=limit)))
    except (RuntimeError, ValueError) as error:
        raise TrainError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not reach the other ranks within "
            f"{timeout:g} s (trainer.rank_timeout) at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: "
            f"{error}"
        ) from error
    return store


def _own_part(store: Any) -> Any:
    """Return a separate connection with keys for this run's watch; torchrun may restart a run on the same store."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"router-replay/{restart}/{next(_runs)}", store.clone())


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('model.device = "cuda", but torch finds no GPU on this machine: set it to "cpu" or "auto"')
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
