"""Keep the routes of finished trajectories in Ray's object store, and read of them only what a rank needs.

    source = keep(routes, codec="dense")     # on the first rank: one immutable object, a seekable blob
    post.send([[], [source]])                # the reference goes to the second rank, the rows do not
    [source] = post.receive(rank=1)          # on the second rank
    source.read(4096, 8192)                  # maps the object, and decodes the chunks of these rows

A rank on another machine gets the whole object if it needs all of it, and otherwise only its part, which is cut out on
the machine that has the object.

An object leaves the store when nobody refers to it any more: the first rank drops its episodes at the end of a step,
and every rank its mini-batches. If the store is full, Ray writes objects to disk, or makes `keep` wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from router_replay import wire
from router_replay.errors import TrainError
from router_replay.rl.config import TrainConfig
from router_replay.route_source import RouteSource
from router_replay.routes import Routes
from router_replay.runs import Runs
from router_replay.spec import RouterSpec

logger = logging.getLogger(__name__)
MESSAGE_SECONDS = 30.0
"""Seconds between two messages that say for what a process waits."""
ROOM_SECONDS = 0.5  # between two attempts to put an object into a full store
POST = "post"  # the name of the actor


class StoredRoutes(RouteSource):
    """The routes of one trajectory in Ray's object store.

    `reference` is that of the object, which holds a seekable blob, and `node` is the Ray node that has it. `spec` is
    the model's, and `captured_runs` says which rows are captured.
    """

    def __init__(self, reference: Any, node: str, spec: RouterSpec, captured_runs: Runs) -> None:
        self.reference = reference
        self._node, self._spec, self._captured = node, spec, captured_runs

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the model that the rows belong to."""
        return self._spec

    @property
    def captured_runs(self) -> Runs:
        """The mask `captured` as runs of equal values."""
        return self._captured

    def open(self) -> wire.Reader:
        """Return a reader of the whole blob, which is mapped and not copied. It counts the bytes that are read of it.

        On another machine than that of the object, Ray brings the object there first.
        """
        return wire.Reader(self._fetched(self.reference), self._spec)

    def read(self, first: int = 0, last: int | None = None, layers: Sequence[int] | None = None) -> Routes:
        """Read the rows from `first` up to but without `last` (default: all), of these `layers` (default: all).

        The rows were checked where they entered, and are not checked again.
        """
        last = len(self) if last is None else last
        wanted = self._spec.layers if layers is None else tuple(layers)
        is_all = (first, last) == (0, len(self)) and wanted == self._spec.layers
        if is_all or self._node == ray.get_runtime_context().get_node_id():
            return self.open().read(first, last, layers, check_rows=False)
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        cut = ray.remote(_cut).options(num_cpus=0, scheduling_strategy=there)
        share = self._fetched(cut.remote(self.reference, self._spec, first, last, wanted))
        return wire.decode(share, spec=self._spec.select(wanted), check_rows=False)

    def _fetched(self, reference: Any) -> Any:
        with saying(lambda: f"waiting for the routes of a trajectory of {len(self)} rows, which the first rank stored"):
            try:
                return ray.get(reference)
            except RayError as error:
                raise TrainError(
                    f"the routes of a trajectory are not in Ray's object store any more: {type(error).__name__}; the "
                    "process or the machine that held them has ended"
                ) from error


def _cut(blob: np.ndarray, spec: RouterSpec, first: int, last: int, layers: Sequence[int]) -> np.ndarray:
    """Return a smaller blob with these rows and layers. It runs on the machine that has `blob`."""
    rows = wire.Reader(blob, spec).read(first, last, layers, check_rows=False)
    return np.frombuffer(wire.encode(rows, codec="dense"), np.uint8)


def keep(routes: Routes, codec: str = "dense") -> StoredRoutes:
    """Put the routes of a trajectory into the store, written with this `codec`. It waits while the store is full."""
    blob = np.frombuffer(wire.encode(routes, codec=codec, seekable=True), np.uint8)
    return StoredRoutes(_put(blob), ray.get_runtime_context().get_node_id(), routes.spec, routes.captured_runs)


def keeper(config: TrainConfig, spec: RouterSpec) -> Callable[[Routes], RouteSource]:
    """Return `keep` with the codec for the policy of this config, whose routers `spec` describes.

    A stage of a Megatron pipeline reads its own layers, which `sets` allows; its router takes a map of experts, in
    which the slots have no order. The sums of a transformers model depend on the order, which `dense` preserves.
    """
    codec = "sets" if config.trainer.backend == "megatron" and not spec.ordered else "dense"
    return lambda routes: keep(routes, codec)


def _put(blob: np.ndarray) -> Any:
    """Put an object into the store; wait, and say so, while the store and its disk have no room."""

    def text() -> str:
        return (
            f"waiting for room for {blob.nbytes} bytes of routes in Ray's object store, which has {_free()} bytes "
            "free; the trainer ranks free some at the end of their step"
        )

    with saying(text):
        while True:
            try:
                return ray.put(blob)
            except (ObjectStoreFullError, OutOfDiskError):
                time.sleep(ROOM_SECONDS)


def _free() -> int:
    return int(ray.available_resources().get("object_store_memory", 0))


@contextlib.contextmanager
def saying(text: Callable[[], str]) -> Iterator[None]:
    """Log `text()` every 30 seconds as long as the block takes."""
    ended = threading.Event()

    def repeat() -> None:
        began = time.monotonic()
        while not ended.wait(MESSAGE_SECONDS):
            logger.warning("%s, for %.0f s now", text(), time.monotonic() - began)

    thread = threading.Thread(target=repeat, name="router-replay-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# -- the way of the references ----------------------------------------------------------------------


class PostActor:
    """Hold the sources of the running step until every rank has taken its own.

    Ray counts references that travel in calls of actors. Bytes of a reference in a message of torch would not count.
    """

    def __init__(self) -> None:
        self._sources: dict[int, Sequence[RouteSource]] = {}

    def send(self, sources: Sequence[Sequence[RouteSource]]) -> None:
        """Replace what is held: `sources` has those of every rank."""
        self._sources = dict(enumerate(sources))

    def take(self, rank: int) -> Sequence[RouteSource] | None:
        """Return the sources of `rank`, and forget them; None if there are none."""
        return self._sources.pop(rank, None)


class RayPost:
    """Bring the sources of rows from the first rank to the others, through the actor that the driver started."""

    def __init__(self) -> None:
        try:
            self._actor = ray.get_actor(POST)
        except ValueError as error:
            raise TrainError(f"the actor {POST!r} of this run is not in the Ray cluster: {error}") from error

    def send(self, sources: Sequence[Sequence[RouteSource]]) -> None:
        """Send every rank its sources. Only the first rank calls it."""
        self._wait(self._actor.send.remote(list(sources)), "takes the references to this step's routes")

    def receive(self, rank: int) -> Sequence[RouteSource]:
        """Return the sources that were sent to `rank` last."""
        found = self._wait(self._actor.take.remote(rank), f"hands rank {rank} the references to its routes")
        if found is None:
            raise TrainError(
                f"the actor {POST!r} lost the references to the routes of rank {rank}: its process was started again "
                "in between; continue with --resume"
            )
        return found

    def _wait(self, answer: Any, doing: str) -> Any:
        with saying(lambda: f"waiting for the actor {POST!r}, which {doing}"):
            try:
                return ray.get(answer)
            except RayActorError as error:
                raise TrainError(f"the actor {POST!r} died, which {doing} ({type(error).__name__})") from error
