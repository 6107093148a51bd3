"""What an engine behind a connection can do, and a request on its way to it. `remote.py` does the rest."""

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

Progress = Mapping[str, Mapping[int, int]]  # rows computed, by the name of a flight and the index of its sample


class BrokenError(EngineError):
    """Raised by `Backend.load` where nobody knows any more which weights the engine holds."""


class Flight:
    """A request on its way: its names at the server, one per sample, and which version computed which of its rows.

    The versions are spans: [(0, 3), (41, 4)] says that rows 0 to 40 were computed by version 3, and rows from 41 on by
    version 4.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        # Random and of one length: SGLang aborts every request whose name begins with the one that it is given.
        self.names = [f"rr-{uuid.uuid4().hex}" for _ in range(request.sampling.n)]
        self.salt = ""  # keeps KV of other weights apart, where a server has a prefix cache with salts
        self.version = 0  # the policy that it started under
        self.started = False
        self.stopped = False  # aborted, perhaps before it started
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Future[list[Completion]] | None = None
        self._spans: list[list[tuple[int, int]]] = []

    @property
    def name(self) -> str:
        return self.names[0]

    def start(self, version: int) -> None:
        self.started, self.version = True, version
        self._spans = [[(0, version)] for _ in range(self.request.sampling.n)]

    def swap(self, computed: Mapping[int, int], version: int) -> None:
        """The weights change: `computed[index]` rows of sample `index` exist; what is not there did not start."""
        for index, spans in enumerate(self._spans):
            first = computed.get(index, 0)
            self._spans[index] = [span for span in spans if span[0] < first] + [(first, version)]

    def row_versions(self, index: int, rows: int) -> np.ndarray:
        versions = np.zeros(rows, np.int64)
        for first, version in self._spans[index]:
            versions[first:] = version
        return versions


class Backend(abc.ABC):
    """An engine behind a connection. Called on the loop of its RemoteEngine only."""

    spec: RouterSpec
    capabilities: Capabilities
    vocabulary: int | None = None
    ends_while_held = False
    """Whether an abort reaches requests of an engine that is held."""

    @abc.abstractmethod
    async def generate(self, flight: Flight) -> list[Completion]:
        """All samples of a request. After a `stop`, what there is."""

    @abc.abstractmethod
    async def stop(self, flights: Sequence[Flight]) -> None:
        """Ask the engine to end these; called again for those that are still there."""

    @abc.abstractmethod
    async def hold(self, kept: Sequence[Flight]) -> None:
        """Stop computing. EngineError where the requests that are kept cannot be."""

    @abc.abstractmethod
    async def go(self) -> None:
        """Go on computing."""

    @abc.abstractmethod
    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Load weights into the held engine; returns how far each kept request was.

        EngineError: the old weights are still there. BrokenError: nobody knows.
        """

    async def find(self, source: WeightSource) -> None:  # noqa: B027  most engines find out by loading
        """Refuse weights that cannot be loaded, before a request is touched."""

    def refuse(self, request: Request) -> None:  # noqa: B027  most refuse nothing
        """Refuse what this engine alone cannot do; the request is checked otherwise."""

    def dead(self) -> bool:
        """Whether calls may wait for an answer that never comes."""
        return False

    @abc.abstractmethod
    async def close(self) -> None: ...
