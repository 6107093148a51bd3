"""Score and update read nothing from the device inside a micro-batch."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from router_replay.rl.policy.policy import Policy
from tests.rl.policy.test_policy import make as make  # the fixture
from tests.rl.policy.test_policy import mini_batch

# The operations by which Python reads a value of a tensor, or needs one to know a shape.
HOST = ("_group",)  # lays out sequences of near lengths, with tensors that are on the host on every machine
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")


class Reads(TorchDispatchMode):
    """Notes each read, with the line of Python that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in READS:
            frames = [frame for frame in traceback.extract_stack() if "/site-packages/torch/" not in frame.filename]
            if frames[-2].name not in HOST:
                self.found.append(f"{func.__name__} at {frames[-2].filename}:{frames[-2].lineno}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
@pytest.mark.parametrize("checkpointing", ["off", "non_reentrant"])
def test_a_micro_batch_reads_nothing_from_the_device(
    make: Callable[..., Policy], mode: str, checkpointing: str
) -> None:
    policy = make(f"replay={mode}", f"model.gradient_checkpointing={checkpointing}")
    mini = mini_batch(policy)
    policy.update(mini, policy.score(mini))  # the first pass looks how the model transforms its logits
    with Reads() as reads:
        scored = policy.score(mini)
        figures = policy.update(mini, scored)
    assert reads.found == []
    assert figures["grad_norm"] > 0


def test_the_check_finds_a_read() -> None:
    with Reads() as reads:
        bool(torch.ones(2).sum() > 1)
    assert len(reads.found) == 1
