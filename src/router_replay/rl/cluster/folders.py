"""Give an actor on another machine the files of a folder of weights, through Ray's object store.

sent = send(folder, to_node)                      # only the path, if the actor is on this machine
folder = received.open(sent, await fetch(sent))   # in the actor: that path, or a copy in its own shared memory
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from router_replay.engines.shared_memory import own_prefix, roomy

_putting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class SentFolder:
    """A folder of weights on its way: its `path`, and the files by name if the actor cannot read this path."""

    path: str
    files: dict[str, Any] | None = None  # ray.ObjectRef


def send(folder: str, to_node: str) -> SentFolder:
    """Return what an actor on the node `to_node` needs to read `folder`. The files are put into the store once."""
    if to_node == ray.get_runtime_context().get_node_id():
        return SentFolder(folder)
    with _putting:
        return SentFolder(folder, _in_store(folder))


@functools.lru_cache(maxsize=2)  # of a run's newest versions; an object leaves the store when nobody refers to it
def _in_store(folder: str) -> dict[str, Any]:
    files = [path for path in pathlib.Path(folder).iterdir() if path.is_file()]
    return {path.name: ray.put(np.fromfile(path, np.uint8)) for path in files}


async def fetch(sent: SentFolder) -> dict[str, np.ndarray]:
    """Return the contents of the files by name, as views of this machine's store; none if the path can be read."""
    files = sent.files or {}
    return dict(zip(files, await asyncio.gather(*files.values()), strict=True))


class Received:
    """Keep the newest folder that was received in this process."""

    def __init__(self) -> None:
        self._copy: pathlib.Path | None = None

    def open(self, sent: SentFolder, files: Mapping[str, np.ndarray]) -> pathlib.Path:
        """Return a folder with the `files` that were fetched, which stays until the next call."""
        if sent.files is None:
            return pathlib.Path(sent.path)
        self.close()
        needed = 2 * sum(map(len, files.values()))  # the engine may keep the last version while it reads this one
        self._copy = pathlib.Path(tempfile.mkdtemp(prefix=own_prefix(), dir=roomy(needed)))
        for name, array in files.items():
            array.tofile(self._copy / name)
        return self._copy

    def close(self) -> None:
        """Remove the copy, if there is one."""
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
            self._copy = None
