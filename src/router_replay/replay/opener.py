"""Opener identifies the code that opened a block: a thread, and the generators and coroutines running in it.

A block belongs to the code that opened it. Two generators or two asyncio tasks that take turns on one thread may not
share a model's blocks: the rows of one would reach the passes of the other. Code that the opener
calls, or that calls the opener, may use its block; all other code may not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from types import FrameType

SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclasses.dataclass(frozen=True)
class Opener:
    """Holds a thread id and the ids of its frames that can be suspended, outermost first."""

    thread: int
    suspendable: tuple[int, ...]

    @classmethod
    def here(cls) -> Opener:
        """Identify the calling code."""
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_back
            if frame.f_code.co_flags & SUSPENDABLE and not _runs_for_a_with_statement(caller):
                frames.append(id(frame))  # lives as long as its generator, which closes its blocks when freed
            frame = caller
        return cls(threading.get_ident(), tuple(reversed(frames)))

    def elsewhere(self, other: Opener) -> str:
        """Return why `other` may not use a block that this one opened; empty if it may."""
        if other.thread != self.thread:
            return "another thread"
        shared = min(len(self.suspendable), len(other.suspendable))
        if self.suspendable[:shared] != other.suspendable[:shared]:
            return "another generator or asyncio task"
        return ""


def _runs_for_a_with_statement(caller: FrameType | None) -> bool:
    """Return whether `caller` runs the generator of a @contextmanager, which is suspended while its block is open."""
    return caller is not None and caller.f_code.co_filename == contextlib.__file__
