"""Names, locks and cleans up the files that this package keeps in shared memory.

A name contains the process and host that created it: router-replay-<process>-at-<host>-<random>. The owner holds a
lock on the file as long as it lives. Containers that share the memory see each other's locks, but not each other's
processes. In a folder shared between hosts, locks may be missing or local to each host, so the name decides there.
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
_UNFINISHED = "router-replay.new-"  # a different prefix, so that a file that is not locked yet is not removed


def roomy(needed: int) -> str | None:
    """Return shared memory if it has room for more than `needed` bytes, or None for the system's temporary folder."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(SHARED_MEMORY).free > needed:
            return str(SHARED_MEMORY)
    return None


def own_prefix() -> str:
    """Return the prefix of all names that this process creates."""
    return f"{PREFIX}{os.getpid()}-at-{socket.gethostname()}-"


def new_name() -> str:
    """Return a name that no other file has."""
    return f"{own_prefix()}{uuid.uuid4().hex}"


def create(path: pathlib.Path) -> int:
    """Create an empty file that only this user can read. Returns its handle, which holds the lock until closed."""
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
    """Remove files left by killed processes: the process in the name no longer exists, and no process has a lock."""
    for left in folder.glob(f"{PREFIX}*"):
        named = re.fullmatch(rf"{PREFIX}(\d+)-(?:at-(?P<host>.+)-)?[^-]*", left.name)
        if named is None or named["host"] not in (None, socket.gethostname()):
            continue
        if pathlib.Path("/proc", named[1]).exists() or is_locked(left):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # already removed, or owned by another user
                left.unlink()


def is_locked(path: pathlib.Path) -> bool:
    """Return whether a process holds the lock of this file. A file that cannot be opened counts as locked."""
    try:
        # Any user may put a link or a pipe there: do not follow links, and do not block on pipes.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # already removed, or owned by another user
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
