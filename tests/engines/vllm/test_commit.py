"""The rows of a step, stored at once, are stored and returned as vLLM's own worker does it, request by request."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import numpy as np
import pytest

from router_replay.engines.vllm.plugin.routes.commit import committing

if importlib.util.find_spec("vllm") is None or not importlib.util.find_spec("vllm.distributed.aux_output_connector"):
    pytest.skip("vLLM stores rows in its worker from 0.31 on (make test-vllm-newest)", allow_module_level=True)

from vllm.distributed.aux_output_connector import store as stores
from vllm.distributed.aux_output_connector import worker as workers
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, PackedBlockHashes
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer

LAYERS, TOP_K, BLOCK, REQUESTS = 3, 2, 4, 6


def storing() -> Any:
    """vLLM's own worker part, with its buffer and store and without a model."""
    made = workers.AuxOutputWorkerConnector.__new__(workers.AuxOutputWorkerConnector)
    made._lock, made._requests, made._generation = threading.Lock(), {}, 0
    made._pending_outputs, made._max_concurrent_batches = [], 2
    made._store = stores.BlockObjectStore(max_bytes=1 << 20, object_nbytes=BLOCK * LAYERS * TOP_K)
    made._buffer = RoutedExpertsBuffer(np.dtype("uint8"), (LAYERS, TOP_K), BLOCK, REQUESTS, 64, 2)
    return made


def committed(worker: Any, names: list[str], starts: list[int], counts: list[int], **told: Any) -> dict[str, Any]:
    """Give the worker one step of these requests, and return its outputs."""
    pending = workers.PendingAuxOutput(
        worker, list(names), np.array(starts, np.int32), np.cumsum([0, *counts]).astype(np.int32), None, **told
    )
    worker._pending_outputs.append(pending)
    for name in names:
        worker._requests[name].pending_outputs += 1
    return {name: (one.token_start, one.rows.tolist()) for name, one in worker.process_output(pending).items()}


def kept(worker: Any) -> Any:
    """All that a worker keeps: cursors, blocks without a key, rows of blocks that are not full, and stored blocks."""
    states = {
        name: (
            *(int(state.capture_cursor or 0), int(state.scheduled_cursor), int(state.emit_cursor)),
            [(int(start), rows.tolist()) for start, rows in state.pending_blocks],
        )
        for name, state in worker._requests.items()
    }
    buffer, store = worker._buffer, worker._store
    tails = {n: (int(t.block_start), buffer._rows[t.slot, : t.length].tolist()) for n, t in buffer._requests.items()}
    held = len(buffer._free_slots), len(buffer._owned_slots)
    return states, tails, held, {key: store.get_concatenated([key]) for key in list(store._lru)}


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_stored_and_returned_as_vllm_does_it(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = np.random.default_rng(seed)
    original = workers.AuxOutputWorkerConnector._commit_output
    theirs, ours = storing(), storing()
    replacement = committing(original)
    monkeypatch.setattr(ours, "_commit_output", lambda pending: replacement(ours, pending), raising=False)
    # position, tokens in all, prompt length, and blocks whose key the worker knows
    length, prompt, keyed = {}, {}, {}
    for step in range(60):
        fresh = f"r{step}" if len(length) < REQUESTS and random.random() < 0.5 else None
        if fresh:
            length[fresh], prompt[fresh], keyed[fresh] = 0, int(random.integers(1, 11)), 0
        names = [name for name in length if random.random() < 0.9]
        if not names:
            continue
        hashes, counts, starts, sampled, rejected = {}, [], [], [], []
        for name in names:
            # The keys of a prompt come with it, later ones after their block, as with asynchronous scheduling.
            full = max(length[name], prompt[name]) // BLOCK
            if full > keyed[name] and (length[name] == 0 or random.random() < 0.7):
                data = b"".join(f"{name}:{one}".encode().ljust(8) for one in range(keyed[name], full))
                hashes[name], keyed[name] = PackedBlockHashes(data, 8), full
            count = 1
            if length[name] < prompt[name]:  # the prompt comes in one or several steps
                count = int(random.integers(1, prompt[name] - length[name] + 1))
            elif random.random() < 0.1:
                count = 3  # drafted tokens, of which some are rejected
            starts.append(length[name])
            counts.append(count)
            done = length[name] + count >= prompt[name]
            sampled.append(int(done))
            rejected.append(int(random.integers(0, 3)) if count == 3 and done and length[name] >= prompt[name] else 0)
            length[name] += count - rejected[-1]
        finished = [name for name in length if name not in names and length[name] and random.random() < 0.2]
        rows = random.integers(0, 200, (sum(counts), LAYERS, TOP_K)).astype(np.uint8)
        seen = []
        for worker in (theirs, ours):
            given = dict.fromkeys(names, 0)
            worker.begin_step(AuxOutputConnectorMetadata(0, given, dict(hashes), tuple(finished)))
            told = {"num_sampled": np.array(sampled), "num_rejected": np.array(rejected), "routed_experts": rows.copy()}
            seen.append((committed(worker, names, starts, counts, **told), kept(worker)))
        assert seen[0] == seen[1]
        for name in finished:
            del length[name], prompt[name], keyed[name]


def test_decoding_requests_do_not_reach_vllms_method() -> None:
    worker, calls = storing(), []

    def original(self: Any, pending: Any) -> dict[str, Any]:
        calls.append(list(pending.request_ids))
        return workers.AuxOutputWorkerConnector._commit_output(self, pending)

    replacement = committing(original)
    worker._commit_output = lambda pending: replacement(worker, pending)
    for step, (counts, starts) in enumerate([([3, 3], [0, 0]), ([1, 1], [3, 3]), ([1, 1], [4, 4])]):
        worker.begin_step(AuxOutputConnectorMetadata(0, {"a": 0, "b": 0}, {}, ()))
        rows = np.full((sum(counts), LAYERS, TOP_K), step, np.uint8)
        told = {"num_sampled": np.ones(2, np.int32), "num_rejected": np.zeros(2, np.int32), "routed_experts": rows}
        committed(worker, ["a", "b"], starts, counts, **told)
    assert calls == [["a", "b"]]  # the prompts
