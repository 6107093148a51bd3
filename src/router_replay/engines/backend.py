"""Defines the interface of a remote engine (`Backend`) and the state of a request in flight (`Flight`).

`remote.py` implements the engine protocol on top of them.
"""

from __future__ import annotations

import abc
import asyncio
import uuid
from collections.abc import Mapping, Sequence

import numpy as np

from router_replay.engines.base import WeightSource
from router_replay.engines.types import Capabilities, Completion, Request
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

Progress = Mapping[str, Mapping[int, int]]  # number of computed rows, by flight name and sample index


class BrokenError(EngineError):
    """Raised by `Backend.load` when it is unknown which weights the engine holds."""


class Flight:
    """Tracks a request in flight: its names on the server (one per sample) and the version that computed each row.

    The versions are stored as spans: [(0, 3), (41, 4)] means that version 3 computed rows 0 to 40, and version 4
    computed the rows from 41 on.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        # Names are random and of equal length: SGLang aborts every request whose name starts with the given one.
        self.names = [f"rr-{uuid.uuid4().hex}" for _ in range(request.sampling.n)]
        self.salt = ""  # separates KV of different weights on servers whose prefix cache supports salts
        self.version = 0  # the policy version that the request started with
        self.started = False
        self.stopped = False  # aborted, possibly before it started
        self.ended = False  # aborted by a weight change, so all its rows were computed with the weights before it
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Future[list[Completion]] | None = None
        self._spans: list[list[tuple[int, int]]] = []

    @property
    def name(self) -> str:
        """The name of the first sample, which stands for the whole request."""
        return self.names[0]

    def start(self, version: int) -> None:
        """Mark the request as started with the weights of this version."""
        self.started, self.version = True, version
        self._spans = [[(0, version)] for _ in range(self.request.sampling.n)]

    def swap(self, computed: Mapping[int, int], version: int) -> None:
        """Record a weight change to `version`.

        `computed[index]` is the number of rows of sample `index` that exist; a missing sample has not started.
        """
        for index, spans in enumerate(self._spans):
            first = computed.get(index, 0)
            self._spans[index] = [span for span in spans if span[0] < first] + [(first, version)]

    @property
    def swapped(self) -> bool:
        """Whether weights changed while the request was running."""
        return any(len(spans) > 1 for spans in self._spans)

    def row_versions(self, index: int, rows: int) -> np.ndarray:
        """Return the version that computed each of the first `rows` rows of sample `index`."""
        versions = np.zeros(rows, np.int64)
        for first, version in self._spans[index]:
            versions[first:] = version
        return versions


class Backend(abc.ABC):
    """Defines the calls to a remote engine. They are made only on the event loop of the RemoteEngine."""

    spec: RouterSpec
    capabilities: Capabilities
    vocabulary: int | None = None
    ends_while_held = False
    """Whether requests can be aborted while the engine is held."""
    aborts_after_load = False
    """Whether requests that a weight change aborts can be aborted after it. The engine computes nothing meanwhile."""

    @abc.abstractmethod
    async def generate(self, flight: Flight) -> list[Completion]:
        """Generate and return all samples of a request. After a `stop`, return what has been generated so far."""

    @abc.abstractmethod
    async def stop(self, flights: Sequence[Flight]) -> None:
        """Ask the engine to abort these requests. It is called again for requests that are still running."""

    @abc.abstractmethod
    async def hold(self, kept: Sequence[Flight]) -> None:
        """Stop computing. Raises EngineError if the engine cannot keep the requests in `kept`."""

    @abc.abstractmethod
    async def go(self) -> None:
        """Resume computing."""

    @abc.abstractmethod
    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Load weights into the held engine and return the progress of each kept request.

        Requests in `kept` that have `ended` will be aborted after the load.
        Raises EngineError if the load failed and the old weights are still in place, and BrokenError if it is unknown
        which weights the engine holds.
        """

    async def find(self, source: WeightSource) -> None:  # noqa: B027  most engines find out by loading
        """Raise EngineError for weights that cannot be loaded, before any request is affected."""

    def refuse(self, request: Request) -> None:  # noqa: B027  most refuse nothing
        """Raise EngineError for what this particular engine cannot do. All other checks of the request are done."""

    def dead(self) -> bool:
        """Return whether the engine has died, so that calls could wait forever for an answer."""
        return False

    async def ping(self) -> None:  # noqa: B027  what `dead` says is enough for an engine of this process
        """Raise EngineError if the engine does not answer."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release the connection or the processes of the engine."""
