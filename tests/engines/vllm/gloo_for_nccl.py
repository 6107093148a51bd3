"""gloo in the place of NCCL, so that both ends of vLLM's weight transfer between GPUs run on CPUs.

`--worker-extension-cls=tests.engines.vllm.gloo_for_nccl.OverGloo` makes every worker import this module, and the test
puts the same parts into the trainer's process. Only what moves bytes is replaced; the protocol is vLLM's own. The
kernels are plain ones, because vLLM's for CPUs keep their old weights after such an update.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import packed_tensor

from tests.engines.vllm.plain_kernels import Plain

SECONDS = 120.0  # that a rank waits for the others


class OverGloo(Plain):
    """Has no methods: importing this module is what matters."""


class Communicator:
    """Has what vLLM's transfer uses of PyNcclCommunicator, over the ranks of vLLM's `group`."""

    def __init__(self, group: Any, device: Any) -> None:
        store = torch.distributed.PrefixStore("gloo for nccl", group.store)
        limit = datetime.timedelta(seconds=SECONDS)
        self._gloo = torch.distributed.ProcessGroupGloo(store, group.rank, group.world_size, limit)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()


class Stream:
    def synchronize(self) -> None:
        """Everything has happened already."""


def parts() -> list[tuple[Any, str, Any]]:
    """What to replace in a process: the object, the name of its attribute, and the new value."""
    return [
        (pynccl, "PyNcclCommunicator", Communicator),
        (packed_tensor, "_get_streams", lambda _, count: tuple(Stream() for _ in range(count))),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    ]


if os.environ.get("ROUTER_REPLAY_TEST_WORKER") == "1":
    for owner, name, value in parts():
        setattr(owner, name, value)
