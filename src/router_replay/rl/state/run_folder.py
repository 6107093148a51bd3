"""Lock the output folder of a run, so that a second run cannot overwrite the first one.

    with hold(config.output) as note:
        ...                        # no other run can use this folder

The lock is an flock on a file in the folder. The kernel releases it when the process ends, even after kill -9, so a
lock is never stale. The file itself stays: removing it would let two processes lock two files of the same name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterator

from router_replay.errors import ConfigError, TrainError
from router_replay.run_files import LOCK_FILE as LOCK

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held: set[int] = set()


@contextlib.contextmanager
def hold(folder: pathlib.Path) -> Iterator[str | None]:
    """Lock the folder, and create it if necessary. Yields a note if its file system has no locks, otherwise None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (OSError, ValueError) as error:
        raise ConfigError(f"output = {str(folder)!r} cannot be written to: {error}; set another output") from error
    _held.add(handle)
    try:
        note = _lock(handle, folder)
        _sign(handle, folder)
        yield note
    finally:
        _held.discard(handle)
        os.close(handle)


def _lock(handle: int, folder: pathlib.Path) -> str | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainError(
            f"{folder} is in use by another run, {_holder(handle)}: wait for it or stop it, or set another output. "
            "Nothing was written"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return f"the file system of {folder} has no locks ({error.strerror}): make sure that no other run writes there"
    return None


def _sign(handle: int, folder: pathlib.Path) -> None:
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except OSError as error:
        raise TrainError(f"{folder / LOCK} cannot be written: {error.strerror}") from error


def _holder(handle: int) -> str:
    """Describe who holds the lock, from what it wrote into the file; the host matters on a shared file system."""
    try:
        signed = json.loads(os.pread(handle, 4096, 0))
        return f"process {signed['pid']} on host {signed['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock but has not written its name yet
        return "whose process id is not known yet"


def _forget_in_child() -> None:
    """Close the lock in a forked child, such as an engine's, which would otherwise keep it when this process ends."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
