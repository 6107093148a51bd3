"""Who opened a block: a thread, and in it the generators and coroutines that were running.

A block belongs to the code that opened it. Two generators or two asyncio tasks that take turns on one thread may not
share a model's blocks: the rows of one would reach the passes of the other. Code that runs inside the opener, or that
the opener runs inside of, may use its block; everybody else is elsewhere.
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
    """A thread, and the frames in it that can be suspended, outermost first."""

    thread: int
    suspendable: tuple[int, ...]

    @classmethod
    def here(cls) -> Opener:
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_back
            if frame.f_code.co_flags & SUSPENDABLE and not _runs_for_a_with_statement(caller):
                frames.append(id(frame))  # alive as long as its generator, which closes its blocks when it dies
            frame = caller
        return cls(threading.get_ident(), tuple(reversed(frames)))

    def elsewhere(self, other: Opener) -> str:
        """Why `other` may not use what this one opened; empty where it may."""
        if other.thread != self.thread:
            return "another thread"
        shared = min(len(self.suspendable), len(other.suspendable))
        if self.suspendable[:shared] != other.suspendable[:shared]:
            return "another generator or asyncio task"
        return ""


def _runs_for_a_with_statement(caller: FrameType | None) -> bool:
    """Is this the generator of a @contextmanager? It is suspended while its block is open, as it should be."""
    return caller is not None and caller.f_code.co_filename == contextlib.__file__
