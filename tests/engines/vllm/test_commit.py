"""Rows of decoding requests, kept together, are stored and returned as vLLM does it request by request."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import pickle
import types
from typing import Any

import numpy as np
import pytest

from router_replay.engines.vllm.plugin.routes import commit
from tests.engines.vllm import aux_worker

if importlib.util.find_spec("vllm") is None or not importlib.util.find_spec("vllm.distributed.aux_output_connector"):
    pytest.skip("vLLM stores rows in its worker from 0.31 on (make test-vllm-newest)", allow_module_level=True)

from vllm.distributed.aux_output_connector import worker as workers
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

LAYERS, TOP_K, BLOCK, REQUESTS = 3, 2, 4, 6
SHAPE = (LAYERS, TOP_K), BLOCK, REQUESTS


class OurWorker(workers.AuxOutputWorkerConnector):
    """vLLM's worker with our replacements."""

    _commit_output = commit.committing(workers.AuxOutputWorkerConnector._commit_output)
    begin_step = commit.beginning(workers.AuxOutputWorkerConnector.begin_step)
    _teardown = commit.ending(workers.AuxOutputWorkerConnector._teardown)


class OurConnector(AuxOutputSchedulerConnector):
    """vLLM's part of the scheduler with our replacement."""

    build_connector_meta = commit.describing(AuxOutputSchedulerConnector.build_connector_meta)


@dataclasses.dataclass
class Request:
    """What the scheduler knows of a request."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    block_hashes: list[bytes]
    sampling_params: Any
    computed: int = 0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


def returned(worker: Any, pending: Any) -> dict[str, Any]:
    """End a step; return the first position and the rows of each request that has some."""
    outputs = worker.process_output(pending)
    found = {name: outputs[name] for name in pending.request_ids if name in outputs}
    return {name: (int(one.token_start), one.rows.tolist()) for name, one in found.items()}


def kept(worker: Any) -> Any:
    """All that a worker keeps: cursors, blocks without a key, rows of blocks that are not full, and stored blocks."""
    if hasattr(worker, "router_replay_decoding"):
        worker.router_replay_decoding.update(worker._requests)
    states = {
        name: (
            *(int(state.capture_cursor or 0), int(state.scheduled_cursor), int(state.emit_cursor)),
            [(int(start), rows.tolist()) for start, rows in state.pending_blocks],
            list(state.aux_output_keys),
        )
        for name, state in worker._requests.items()
    }
    buffer, store = worker._buffer, worker._store
    tails = {n: (int(t.block_start), buffer._rows[t.slot, : t.length].tolist()) for n, t in buffer._requests.items()}
    held = len(buffer._free_slots), len(buffer._owned_slots)
    return states, tails, held, {key: store.get_concatenated([key]) for key in list(store._lru)}


class Both:
    """A scheduler's requests, and vLLM's own parts beside those with our replacements."""

    def __init__(self, seed: int, drafts: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.drafts = drafts
        self.connectors = AuxOutputSchedulerConnector(), OurConnector()
        kinds = workers.AuxOutputWorkerConnector, OurWorker
        self.workers = [aux_worker.storing(kind, *SHAPE) for kind in kinds]
        self.requests: dict[str, Request] = {}
        self.number = 0

    def step(self) -> tuple[Any, Any]:
        """Run one random step on both sides; return what each answers and keeps."""
        random = self.random
        if len(self.requests) < REQUESTS and random.random() < 0.4:
            self._add()
        if random.random() < 0.05 and self.requests:
            self._preempt(str(random.choice(list(self.requests))))
        if random.random() < 0.02:
            for connector in self.connectors:
                connector.reset()
            for request in self.requests.values():
                request.computed = 0
                self._hash(request)
        chosen = [request for request in self.requests.values() if random.random() < 0.95]
        counts, sampled, rejected = [], [], []
        for request in chosen:
            left = request.num_tokens - request.computed
            draft = self.drafts and left == 1 and request.num_output_tokens > 0 and random.random() < 0.2
            counts.append(3 if draft else int(random.integers(1, left + 1)) if random.random() < 0.3 else left)
            done = request.computed + counts[-1] >= request.num_tokens
            sampled.append(int(done))
            rejected.append(int(random.integers(0, 3)) if draft else 0)
        scheduled = {request.request_id: count for request, count in zip(chosen, counts, strict=True)}
        told = {
            "num_sampled": np.array(sampled, np.int32),
            "num_rejected": np.array(rejected, np.int32),
            "routed_experts": random.integers(0, 200, (sum(counts), LAYERS, TOP_K)).astype(np.uint8),
        }
        starts = np.array([request.computed for request in chosen], np.int32)
        bounds = np.cumsum([0, *counts]).astype(np.int32)
        seen = []
        for connector, worker in zip(self.connectors, self.workers, strict=True):
            output = types.SimpleNamespace(num_scheduled_tokens=scheduled)
            metadata = pickle.loads(pickle.dumps(connector.build_connector_meta(output, self.requests)))
            pending = aux_worker.begun(worker, metadata, list(scheduled), starts, bounds, **copy.deepcopy(told))
            seen.append((returned(worker, pending), kept(worker)))
        for request, count, done, lost in zip(chosen, counts, sampled, rejected, strict=True):
            request.computed += count - lost
            if done:
                request.num_tokens = request.computed + 1
            self._hash(request, late=request.num_output_tokens > 1 and random.random() < 0.3)
            if done and random.random() < 0.05:
                self._end(request.request_id)
        return seen[0], seen[1]

    def _add(self) -> None:
        name, prompt = f"r{self.number}", int(self.random.integers(1, 11))
        self.number += 1
        parameters = types.SimpleNamespace(routed_experts_prompt_start=int(self.random.integers(0, prompt + 1)))
        self.requests[name] = Request(name, prompt, prompt, [], parameters)
        self._hash(self.requests[name])

    def _hash(self, request: Request, late: bool = False) -> None:
        """Give the blocks that are full their hashes; the last one may come late, as with asynchronous scheduling."""
        full = request.num_tokens // BLOCK
        late = late and full - len(request.block_hashes) == 1
        for block in range(len(request.block_hashes), full - late):
            request.block_hashes.append(f"{request.request_id}:{block}".encode().ljust(8))

    def _preempt(self, name: str) -> None:
        for connector in self.connectors:
            connector.request_finished(self.requests[name])
        request = self.requests.pop(name)
        request.computed = 0
        self._hash(request)
        output = types.SimpleNamespace(num_scheduled_tokens={})
        for connector, worker in zip(self.connectors, self.workers, strict=True):
            worker.begin_step(connector.build_connector_meta(output, self.requests))
        self.requests[name] = request

    def _end(self, name: str) -> None:
        for connector in self.connectors:
            connector.request_finished(self.requests[name])
        del self.requests[name]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_rows_are_stored_and_returned_as_vllm_does_it(seed: int, drafts: bool) -> None:
    both = Both(seed, drafts)
    for _ in range(120):
        theirs, ours = both.step()
        assert theirs == ours
    assert both.number > REQUESTS  # requests ended and others came


def decoded(worker: Any, steps: int) -> list[Any]:
    """Run two requests: their prompts, then so many steps in which each decodes a token. Return what it answered."""
    connector = OurConnector()
    requests = {n: Request(n, 3, 3, [], types.SimpleNamespace(routed_experts_prompt_start=0)) for n in ("a", "b")}
    answers = []
    for number in range(steps + 1):
        count = 1 if number else 3
        output = types.SimpleNamespace(num_scheduled_tokens=dict.fromkeys(requests, count))
        told = {
            "num_sampled": np.ones(2, np.int32),
            "num_rejected": np.zeros(2, np.int32),
            "routed_experts": np.full((2 * count, LAYERS, TOP_K), number, np.uint8),
        }
        starts = np.full(2, number + 2 if number else 0, np.int32)
        metadata = connector.build_connector_meta(output, requests)
        pending = aux_worker.begun(worker, metadata, list(requests), starts, [0, count, 2 * count], **told)
        answers.append(worker.process_output(pending))
        for request in requests.values():
            request.num_tokens += 1
    return answers


def test_decoding_requests_do_not_reach_vllms_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def original(self: Any, pending: Any) -> dict[str, Any]:
        calls.append(list(pending.request_ids))
        return workers.AuxOutputWorkerConnector._commit_output(self, pending)

    monkeypatch.setattr(OurWorker, "_commit_output", commit.committing(original))
    decoded(aux_worker.storing(OurWorker, *SHAPE), 20)
    assert calls == [["a", "b"]]  # the prompts


def test_a_request_is_described_while_it_is_new_only() -> None:
    connector = OurConnector()
    request = Request("a", 3, 3, [], types.SimpleNamespace(routed_experts_prompt_start=0))
    output = types.SimpleNamespace(num_scheduled_tokens={"a": 1})
    described = []
    for _ in range(commit.DESCRIBED + 2):
        described.append(list(connector.build_connector_meta(output, {"a": request}).requests))
    assert described == [["a"]] * commit.DESCRIBED + [[], []]
    request.block_hashes.append(b"12345678")
    assert list(connector.build_connector_meta(output, {"a": request}).block_hashes) == ["a"]


def test_the_rows_of_a_step_survive_the_way_to_another_process() -> None:
    *_, step = decoded(aux_worker.storing(OurWorker, *SHAPE), 3)
    arrived = pickle.loads(pickle.dumps(step))
    assert [one.rows.tolist() for one in arrived.values()] == [step["a"].rows.tolist(), step["b"].rows.tolist()]
    assert [one.token_start for one in arrived.values()] == [5, 5]


def test_a_request_that_ended_is_not_taken_for_one_that_decodes() -> None:
    """It may come again in a step with the same requests, after a preemption."""
    worker = aux_worker.storing(OurWorker, *SHAPE)
    decoded(worker, 3)
    worker._teardown(["a"])
    ended, decoding = worker.router_replay_decoding._places_of(["a", "b"]).tolist()
    assert ended == -1
    assert decoding >= 0


def test_blocks_are_written_without_a_thread() -> None:
    """The thread of vLLM's store ends, and the worker closes the store that it holds."""
    from vllm.distributed.aux_output_connector.store import BackgroundBlockObjectStore, BlockObject, BlockObjectStore

    inner = BlockObjectStore(max_bytes=64, object_nbytes=4)
    background = BackgroundBlockObjectStore(inner, max_pending_batches=2)
    worker = types.SimpleNamespace()
    commit.writing(lambda made: setattr(made, "_store", background))(worker)
    background._thread.join(120)
    assert not background._thread.is_alive()
    worker._store.put([BlockObject("a", b"rows")])
    assert worker._store.get_concatenated(["a"]) == b"rows"
    worker._store.close()


def test_a_rank_without_a_store_has_none() -> None:
    worker = types.SimpleNamespace()
    commit.writing(lambda made: setattr(made, "_store", None))(worker)
    assert worker._store is None
