"""Ctrl-C is for the process that started an engine, not for the engine.

A terminal sends it to every process of a run. vLLM's would end at once, while the trainer is in the middle of a step
that it wants to finish and save. The starter is told apart by an environment variable; a server has none, and ends.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any

OWNER = "ROUTER_REPLAY_VLLM_OWNER"


def install() -> None:
    """In the processes that an owner started: ignore SIGINT, also where vLLM sets its own handler later."""
    owner = os.environ.get(OWNER)
    if not owner or owner == str(os.getpid()):
        return
    from vllm.v1.engine.core import EngineCoreProc

    _ignore()
    if getattr(EngineCoreProc.run_busy_loop, "router_replay", False):
        return
    original = EngineCoreProc.run_busy_loop

    @functools.wraps(original)
    def run_busy_loop(self: Any) -> Any:
        _ignore()
        return original(self)

    run_busy_loop.router_replay = True  # type: ignore[attr-defined]
    EngineCoreProc.run_busy_loop = run_busy_loop


def _ignore() -> None:
    if threading.current_thread() is threading.main_thread():  # only there may handlers be set
        signal.signal(signal.SIGINT, signal.SIG_IGN)
