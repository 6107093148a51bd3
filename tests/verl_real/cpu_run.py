"""What main_ppo needs on a CPU beyond cpu.py; every process of a run imports it by VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from tests.verl_real import cpu

__all__ = ["cpu"]
_init_process_group = dist.init_process_group


@functools.wraps(_init_process_group)
def init_process_group(backend: str | None = None, *others: Any, **named: Any) -> None:
    """verl asks for one backend for CPUs and one for its device, which torch refuses if that is the CPU too."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *others, **named)


dist.init_process_group = init_process_group
