"""Ctrl-C is for the process that started an engine, not for the engine.

A terminal sends it to every process of a run. vLLM's would end at once, while the trainer is in the middle of a step
that it wants to finish and save. The starter is told apart by an environment variable; a server has none, and ends.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from router_replay.engines.vllm.plugin import seams

OWNER = "ROUTER_REPLAY_VLLM_OWNER"


def install() -> None:
    """In the processes that an owner started: ignore SIGINT, also where vLLM sets its own handler later."""
    owner = os.environ.get(OWNER)
    if not owner or owner == str(os.getpid()):
        return
    from vllm.v1.engine.core import EngineCoreProc

    _ignore()
    seams.wrap(EngineCoreProc, "run_busy_loop", _ignoring)


def _ignoring(original: Any) -> Any:
    def run_busy_loop(self: Any) -> Any:
        _ignore()
        return original(self)

    return run_busy_loop


def _ignore() -> None:
    if threading.current_thread() is threading.main_thread():  # only there may handlers be set
        signal.signal(signal.SIGINT, signal.SIG_IGN)
