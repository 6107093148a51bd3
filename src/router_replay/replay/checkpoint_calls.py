"""Find the checkpoint that a router call runs in, and whether it is the checkpoint's forward or its recompute.

torch calls a checkpointed function twice and tells neither call which one it is. Both calls have a Python object of
the checkpoint on their call stack, though: the `ctx` of an autograd Function (reentrant checkpoints, and those of
DeepSpeed, Megatron and others), or torch's `_CheckpointFrame` (non-reentrant ones). The same object is on the
stack in the forward and in the recompute, and is freed with the graph. So it maps a recompute to its forward.

The names that are looked up are private to torch. If they are not found, State.decide raises in a recompute.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch.utils.checkpoint

_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_FILE = torch.utils.checkpoint.__file__


def surrounding_checkpoints() -> tuple[list[Any], Any]:
    """Return the checkpoints whose forward runs this call, and the innermost one being recomputed, or None."""
    entered: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _CHECKPOINT:
            entered.append(_non_reentrant_forward(frame))
        elif code.co_name == "unpack_hook" and code.co_filename == _FILE:
            return _known(entered), frame.f_locals.get("frame", _NOT_FOUND)
        elif code.co_varnames[:1] == ("ctx",) and code.co_argcount:
            if code.co_name == "backward":
                return _known(entered), frame.f_locals["ctx"]
            if code.co_name == "forward":
                entered.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return _known(entered), None


class _NotFound:
    """Represents a checkpoint whose object could not be found; no forward is ever stored under it."""


_NOT_FOUND = _NotFound()


def _non_reentrant_forward(frame: FrameType) -> Any:
    """Return the frame object from the generator of torch.utils.checkpoint.checkpoint; None in a reentrant one."""
    generator = frame.f_locals.get("gen")
    if generator is None or generator.gi_frame is None:
        return None
    return generator.gi_frame.f_locals.get("new_frame")


def _known(entered: list[Any]) -> list[Any]:
    return [checkpoint for checkpoint in entered if checkpoint is not None]
