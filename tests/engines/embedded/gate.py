"""A gate to act in the middle of the embedded engine's generation.

It holds the engine's thread behind an exact pass until the command that is tested waits in line.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

from router_replay.engines import Sampling
from router_replay.engines.embedded import EmbeddedEngine

SEEDED = Sampling(max_tokens=12, seed=5, ignore_eos=True)


class Gate:
    """Stops the engine behind pass number `passes` (0 is the next one) until `then` has put a command in line."""

    def __init__(self, engine: EmbeddedEngine, passes: int) -> None:
        self.engine, self.left = engine, passes
        self.reached, self.opened = threading.Event(), threading.Event()
        self.hook = engine._model.register_forward_hook(self._after)

    def _after(self, *_: Any) -> None:
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(120)
        self.left -= 1

    def then(self, *commands: Callable[[], Any]) -> list[concurrent.futures.Future[Any]]:
        assert self.reached.wait(120)
        futures = []
        for command in commands:
            waiting = len(self.engine._commands)
            futures.append(in_thread(command))
            while len(self.engine._commands) == waiting and not futures[-1].done():
                time.sleep(0.001)
        self.hook.remove()
        self.opened.set()
        return futures


def in_thread(command: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(command())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def landed(future: concurrent.futures.Future[Any]) -> Any:
    return future.result(timeout=120)
