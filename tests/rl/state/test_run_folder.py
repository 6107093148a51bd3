"""Two runs never share an output folder, and no lock outlives its process."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from router_replay.errors import ConfigError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.train import train
from router_replay.rl.state import run_folder
from router_replay.rl.state.run_folder import LOCK, hold

HOLDER = """
import pathlib, sys, time
from router_replay.rl.state.run_folder import hold
with hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def start_holder(folder: pathlib.Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_while_the_first_one_works(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("steps=1", "replay=off")
    holder = start_holder(config.output)
    try:
        for resume in (False, True):
            with pytest.raises(TrainError) as raised:
                train(config, resume=resume)
            message = str(raised.value)
            assert f"{config.output} is in use by another run, process {holder.pid} on host {os.uname().nodename}" in (
                message
            )
            assert "set another output" in message
        assert [path.name for path in config.output.iterdir()] == [LOCK]  # nothing was written
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert train(config, resume=True).step == 1  # kill -9 frees the folder


def test_a_forked_child_does_not_keep_the_folder_when_its_parent_is_killed(tmp_path: pathlib.Path) -> None:
    # The child says when it runs: before that, it may not have let go of the lock yet.
    fork = "import os\n    read, write = os.pipe()\n    if os.fork() == 0:\n        os.write(write, b'.')\n        "
    fork += "time.sleep(600)\n    os.read(read, 1)\n    print"
    script = HOLDER.replace("print", fork)
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with hold(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the child, which lives on


def test_a_folder_is_free_again_after_its_run(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        with hold(tmp_path / "run"):
            pass


def test_what_cannot_be_a_folder_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "inside", pathlib.Path("a\0b")):
        with pytest.raises(ConfigError, match=r"output = .* cannot be written to"), hold(output):
            pass


def test_a_file_system_without_locks_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    with hold(tmp_path) as note:
        assert note is not None
        assert "has no locks" in note
