"""What this package keeps in shared memory: how it is named, locked while in use, and swept when its owner was killed.

A name holds the process and the host that made it: router-replay-<process>-at-<host>-<random>. The owner holds a lock
on it as long as it lives. A lock is seen by other containers on the same memory, which do not see each other's
processes. In a folder that hosts share, locks may be missing or be kept by each host to itself: there the name counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import socket
import uuid

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFIX = "router-replay-"
_UNFINISHED = "router-replay.new-"  # not the prefix: what is not locked yet must not be swept


def own_prefix() -> str:
    """How all names begin that this process gives."""
    return f"{PREFIX}{os.getpid()}-at-{socket.gethostname()}-"


def new_name() -> str:
    return f"{own_prefix()}{uuid.uuid4().hex}"


def create(path: pathlib.Path) -> int:
    """A new empty file that only this user can read; returns its handle, which holds the lock until it is closed."""
    unfinished = path.with_name(path.name.replace(PREFIX, _UNFINISHED, 1))
    handle = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.rename(unfinished, path)
    except BaseException:
        os.close(handle)
        unfinished.unlink(missing_ok=True)
        raise
    return handle


def sweep(folder: pathlib.Path) -> None:
    """Remove what killed processes left: named after a process that is no more, and locked by none."""
    for left in folder.glob(f"{PREFIX}*"):
        named = re.fullmatch(rf"{PREFIX}(\d+)-(?:at-(?P<host>.+)-)?[^-]*", left.name)
        if named is None or named["host"] not in (None, socket.gethostname()):
            continue
        if pathlib.Path("/proc", named[1]).exists() or is_locked(left):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
                left.unlink()


def is_locked(path: pathlib.Path) -> bool:
    try:
        # Anybody may put a link or a pipe there: the one is not followed, the other not waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # gone meanwhile, or somebody else's
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
