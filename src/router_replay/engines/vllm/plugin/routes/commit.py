"""Keep the captured rows of decoding requests together in vLLM 0.31 and newer, instead of request by request.

vLLM's worker keeps the rows of every request in blocks, as the KV cache keeps its tokens. After each step it copies the
new rows into these blocks and wraps each in an object, which the scheduler unwraps. Before each step the scheduler
describes every request to the worker. All of this is Python code that runs for each request in each step.

Here a request that decodes one token per step has an entry in two arrays: the position of its next row, and the block
that receives it. A step of such requests costs a few array operations. vLLM's own records of such a request (cursors,
the length of its last block) are brought up to date when something else happens to it, and vLLM's own code continues.

    worker       __init__         writes blocks where they are made, not in a thread
                 _commit_output   stores the rows of decoding requests, and leaves the others to vLLM
                 begin_step       updates the cursors of requests that the scheduler describes
                 _teardown        forgets requests that ended
    scheduler    build_connector_meta   describes only requests that are new or have new block hashes
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from router_replay.engines.vllm import versions
from router_replay.engines.vllm.plugin import seams

# A request is described in so many steps after it is new. The worker ends a preempted request only when its last step
# was read; if the request is already new again by then, this describes it once more. vLLM has two steps at once.
DESCRIBED = 4


def install() -> None:
    """Wrap the methods of vLLM's worker and scheduler that this module lists, unless a seam does not fit."""
    import vllm

    if not versions.uses_second_runner(vllm.__version__) or seams.problems("storage"):
        return
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    seams.wrap(AuxOutputWorkerConnector, "__init__", writing)
    seams.wrap(AuxOutputWorkerConnector, "_commit_output", committing)
    seams.wrap(AuxOutputWorkerConnector, "begin_step", beginning)
    seams.wrap(AuxOutputWorkerConnector, "_teardown", ending)
    seams.wrap(AuxOutputSchedulerConnector, "build_connector_meta", describing)


# -- the worker -------------------------------------------------------------------------------------


def writing(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of `AuxOutputWorkerConnector.__init__` that does not leave full blocks to a thread.

    That thread shares Python's lock with the engine, which waits for it at each call into torch. Writing a block takes
    a few microseconds; waiting for the thread takes longer, and much longer if the machine is busy.
    """

    def initialize(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        background = self._store
        if background is not None:
            self._store = background._store
            background._queue.put(None)  # ends the thread

    return initialize


def committing(original: Callable[[Any, Any], dict[str, Any]]) -> Callable[[Any, Any], Any]:
    """Return a replacement of `AuxOutputWorkerConnector._commit_output`."""

    def commit(self: Any, pending: Any) -> Any:
        rows, buffer = pending.routed_experts, self._buffer
        if rows is None or rows.dtype != buffer.dtype or rows.shape[1:] != buffer.shape_per_token:
            return original(self, pending)  # vLLM raises the error
        decoding = _decoding_of(self)
        outputs, left = decoding.store(pending)
        if left:
            decoding.give_back(pending.request_ids[index] for index in left)
            outputs.others = original(self, _only(pending, left))
            decoding.take(pending.request_ids[index] for index in left if pending.num_sampled[index] > 0)
        return outputs

    return commit


def beginning(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a replacement of `AuxOutputWorkerConnector.begin_step`."""

    def begin_step(self: Any, metadata: Any) -> None:
        if self._buffer is not None and metadata is not None:
            with self._lock:
                _decoding_of(self).update(metadata.requests)
        original(self, metadata)

    return begin_step


def ending(original: Callable[[Any, Iterable[str]], None]) -> Callable[[Any, Iterable[str]], None]:
    """Return a replacement of `AuxOutputWorkerConnector._teardown`."""

    def teardown(self: Any, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        _decoding_of(self).forget(names)
        original(self, names)

    return teardown


def _decoding_of(worker: Any) -> Decoding:
    """Return the requests that decode in this worker. A new generation of vLLM's records starts without any."""
    found: Decoding | None = getattr(worker, "router_replay_decoding", None)
    if found is None or found.generation != worker._generation:
        found = worker.router_replay_decoding = Decoding(worker)
    return found


class Decoding:
    """Hold the position of the next row, and the block that receives it, for the decoding requests of one worker."""

    def __init__(self, worker: Any) -> None:
        self.generation = worker._generation
        self._worker = worker
        self._places: dict[str, int] = {}  # request -> its index in the two arrays
        self._free: list[int] = []
        self._position = np.zeros(0, np.int64)
        self._block = np.zeros(0, np.int64)
        self._last: tuple[Sequence[str], np.ndarray] = [], np.zeros(0, np.int64)

    def store(self, pending: Any) -> tuple[StepRows, list[int]]:
        """Store the rows of requests that continue to decode. Return them, and the indices of the other requests."""
        buffer, names, bounds = self._worker._buffer, pending.request_ids, pending.query_start_loc
        places = self._places_of(names)
        fits = places >= 0
        if fits.any():  # otherwise the arrays may be empty
            fits &= self._position[places] == pending.token_starts
        fits &= (bounds[1:] - bounds[:-1]) == 1
        fits &= (pending.num_sampled > 0) & (pending.num_rejected == 0)
        rows, left = pending.routed_experts, []
        if not fits.all():
            left = np.flatnonzero(~fits).tolist()
            places, rows = places[fits], rows[bounds[:-1][fits]]
            names = [name for name, fit in zip(names, fits.tolist(), strict=True) if fit]
        if not names:
            return StepRows(), left
        position = self._position[places]
        row = position % buffer.block_size
        for index in np.flatnonzero(row == 0).tolist():
            self._block[places[index]] = buffer._tail(names[index], int(position[index])).slot
        buffer._rows[self._block[places], row] = rows
        self._position[places] = position + 1
        full = np.flatnonzero(row == buffer.block_size - 1).tolist()
        if full:
            self._publish([names[index] for index in full])
        return StepRows(names, position, rows), left

    def _places_of(self, names: Sequence[str]) -> np.ndarray:
        """Return the index of each request, -1 if it does not decode. Most steps have the requests of the last one."""
        last, places = self._last
        if last != names:
            get = self._places.get
            places = np.array([get(name, -1) for name in names], np.int64)
            self._last = names, places
        return places

    def _publish(self, names: Sequence[str]) -> None:
        """Hand the full blocks of these requests to vLLM."""
        buffer, batches = self._worker._buffer, []
        for name in names:
            tail = buffer._requests.pop(name)
            block = buffer._rows[tail.slot]
            buffer._owned_slots[id(block)] = tail.slot
            batches.append((self._worker._requests[name], [(tail.block_start, block)]))
        self._worker._publish_blocks(batches)

    def take(self, names: Iterable[str]) -> None:
        """Take over the requests whose rows so far are all stored and sent."""
        buffer = self._worker._buffer
        for name in names:
            state, tail = self._worker._requests[name], buffer._requests.get(name)
            position = state.capture_cursor
            stored = tail.block_start + tail.length if tail is not None else position
            if not position == stored == state.emit_cursor == state.scheduled_cursor:
                continue  # rows were left out or rejected
            if tail is None and position % buffer.block_size:
                continue
            if not self._free:
                self._grow()
            place = self._places[name] = self._free.pop()
            self._last = [], self._position[:0]
            self._position[place] = position
            self._block[place] = tail.slot if tail is not None else -1

    def give_back(self, names: Iterable[str]) -> None:
        """Bring vLLM's records of these requests up to date and leave the requests to vLLM."""
        given = [name for name in names if name in self._places]
        self.update(given)
        self.forget(given)

    def update(self, names: Iterable[str]) -> None:
        """Bring vLLM's records of these requests up to date."""
        for name in names:
            place = self._places.get(name)
            if place is None:
                continue
            state, tail = self._worker._requests[name], self._worker._buffer._requests.get(name)
            position = int(self._position[place])
            state.capture_cursor = state.scheduled_cursor = state.emit_cursor = position
            if tail is not None:
                tail.length = position - tail.block_start

    def forget(self, names: Iterable[str]) -> None:
        """Drop these requests."""
        for name in names:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)
                self._last = [], self._position[:0]

    def _grow(self) -> None:
        size = len(self._position)
        added = max(size, 64)
        self._position = np.concatenate([self._position, np.zeros(added, np.int64)])
        self._block = np.concatenate([self._block, np.zeros(added, np.int64)])
        self._free.extend(range(size, size + added))


@dataclasses.dataclass
class StepRows:
    """Hold the rows of a step: those of decoding requests in one array, vLLM's objects of the other requests by name.

    vLLM looks up one request at a time, and then a row of the array becomes vLLM's object. The packed delivery takes
    the array instead.
    """

    names: Sequence[str] = ()
    position: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint8))
    others: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """The index of each decoding request in `rows`."""
        return {name: index for index, name in enumerate(self.names)}

    def __contains__(self, name: str) -> bool:
        return name in self.others or name in self.index

    def __getitem__(self, name: str) -> Any:
        if name in self.others:
            return self.others[name]
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        index = self.index[name]
        return AuxRequestOutput(int(self.position[index]), self.rows[index : index + 1])

    def values(self) -> list[Any]:
        """Return vLLM's objects of all requests."""
        self.others.update([(name, self[name]) for name in self.names])  # kept, because vLLM changes them (Ray)
        return list(self.others.values())


def _only(pending: Any, indices: list[int]) -> Any:
    """Return the part of a step's output that belongs to the requests at these indices."""
    if len(indices) == len(pending.request_ids):
        return pending
    bounds = pending.query_start_loc
    rows = [pending.routed_experts[bounds[index] : bounds[index + 1]] for index in indices]
    return dataclasses.replace(
        pending,
        request_ids=[pending.request_ids[index] for index in indices],
        token_starts=pending.token_starts[indices],
        query_start_loc=np.cumsum([0, *map(len, rows)]),
        routed_experts=np.concatenate(rows),
        num_sampled=pending.num_sampled[indices],
        num_rejected=pending.num_rejected[indices],
    )


# -- the scheduler ----------------------------------------------------------------------------------


def describing(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a replacement of `AuxOutputSchedulerConnector.build_connector_meta`."""

    def build_connector_meta(self: Any, scheduler_output: Any, requests: dict[str, Any]) -> Any:
        sent, scheduled = self._sent_hash_counts, scheduler_output.num_scheduled_tokens
        recent = getattr(self, "router_replay_recent", None)
        if recent is None:
            recent = self.router_replay_recent = collections.deque(maxlen=DESCRIBED)
        recent.append([name for name in scheduled if name not in sent])
        described = {name: scheduled[name] for names in recent for name in names if name in scheduled}
        # vLLM's method goes through all requests it knows, so it is shown the described ones only.
        self._sent_hash_counts = {name: sent[name] for name in described if name in sent}
        try:
            metadata = original(self, _Described(described), requests)
        finally:
            sent.update(self._sent_hash_counts)
            self._sent_hash_counts = sent
        for name in [name for name, count in sent.items() if len(requests[name].block_hashes) != count]:
            hashes = requests[name].block_hashes
            metadata.block_hashes[name] = self._pack_new_hashes(hashes, sent[name])
            sent[name] = len(hashes)
        return metadata

    return build_connector_meta


@dataclasses.dataclass(frozen=True)
class _Described:
    """The part of a SchedulerOutput that `build_connector_meta` reads."""

    num_scheduled_tokens: dict[str, int]
