"""Make the engine's processes ignore Ctrl-C, so that the process that started the engine handles it.

A terminal sends SIGINT to every process of a run. vLLM's processes would end at once, while the trainer is in the
middle of a step that it wants to finish and save. An environment variable marks engines that have such an owner; a
server does not have it, and ends on Ctrl-C as usual.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from router_replay.engines.vllm.plugin import seams

OWNER = "ROUTER_REPLAY_VLLM_OWNER"


def install() -> None:
    """Ignore SIGINT in processes that an owner started, even if vLLM sets its own handler later."""
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
    if threading.current_thread() is threading.main_thread():  # handlers can only be set in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
