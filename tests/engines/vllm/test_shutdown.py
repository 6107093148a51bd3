"""Test that a closed engine leaves nothing in shared memory, also if one of its processes ends late."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.engines.conftest import OWN_WORKER, SHAPE, Checkpoints

# vLLM waits 5 s by default. The worker sleeps longer, then the engine core has to remove the memory between the two.
LATE_SECONDS = 7
SCRIPT = """
import os, pathlib, re, signal, sys, threading, time
import psutil
from router_replay.engines.vllm.inprocess import VllmEngine


def blocks(process):
    return set(re.findall(r"/dev/shm/psm_\\w+", pathlib.Path(f"/proc/{process.pid}/maps").read_text()))


def wake(process):
    time.sleep(float(sys.argv[2]))
    process.send_signal(signal.SIGCONT)


def main():
    with VllmEngine(sys.argv[1], **eval(sys.argv[3])) as engine:
        processes = psutil.Process().children(recursive=True)
        shared = {block for process in processes for block in blocks(process)}
        [worker] = [process for process in processes if not process.children() and blocks(process)]
        worker.send_signal(signal.SIGSTOP)
        threading.Thread(target=wake, args=(worker,)).start()
    print(len(shared), "blocks of shared memory, left:", [block for block in shared if os.path.exists(block)])


if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_whose_worker_ends_late_leaves_no_shared_memory(checkpoints: Checkpoints, tmp_path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    shape = repr({**SHAPE, "use_tqdm_on_load": False})
    done = subprocess.run(
        [sys.executable, str(script), checkpoints.a, str(LATE_SECONDS), shape],
        env={**os.environ, **OWN_WORKER, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 blocks of shared memory, left: []"
    assert "leaked shared_memory" not in done.stderr
