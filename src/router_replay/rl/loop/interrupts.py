"""End a run on Ctrl-C only where its state can be saved.

with Interrupts() as interrupts:
    ...                        # KeyboardInterrupt at once: nothing has changed yet
    with interrupts.held():
        ...                    # weights change: the interrupt waits for the end of the block
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, Self


class Interrupts:
    """Handle SIGINT and SIGTERM. With `at_once=False` they only set `asked`, because ranks must agree to stop."""

    def __init__(self, at_once: bool = True) -> None:
        self.asked = False
        self._at_once = at_once
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # handlers can only be set in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the block has ended."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.asked and self._at_once:
            raise KeyboardInterrupt

    def _on_signal(self, *_: object) -> None:
        again, self.asked = self.asked, True
        if again or (self._at_once and not self._held):  # a second request means that the user does not want to wait
            raise KeyboardInterrupt
