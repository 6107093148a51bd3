"""Store the captured rows of a step at once in the worker of vLLM 0.31 and newer.

vLLM's worker keeps the rows of every request in blocks, as the KV cache keeps its tokens. After each step it copies the
new rows into these blocks, request by request. For 256 decoding requests that takes about half as long as the step
itself. Here all requests that decode one token are copied with one assignment. Every other request (a prompt, a
rejected or repeated token) is left to vLLM's own method, in a batch without the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from router_replay.engines.vllm import versions
from router_replay.engines.vllm.plugin import seams


def install() -> None:
    """Wrap the method of vLLM's worker that stores the rows of a step, unless a seam does not fit."""
    import vllm

    if not versions.uses_second_runner(vllm.__version__) or seams.problems("storage"):
        return
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    seams.wrap(AuxOutputWorkerConnector, "_commit_output", committing)


def committing(original: Callable[[Any, Any], dict[str, Any]]) -> Callable[[Any, Any], dict[str, Any]]:
    """Return a replacement of `AuxOutputWorkerConnector._commit_output`."""

    def commit(self: Any, pending: Any) -> dict[str, Any]:
        outputs, left = _commit_decoded(self, pending)
        if left:
            outputs.update(original(self, _only(pending, left)))
        return outputs

    return commit


def _commit_decoded(worker: Any, pending: Any) -> tuple[dict[str, Any], list[int]]:
    """Store the rows of requests that decode one token. Return their outputs, and the indices of the other requests."""
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

    rows, buffer = pending.routed_experts, worker._buffer
    if rows is None or rows.dtype != buffer.dtype or rows.shape[1:] != buffer.shape_per_token:
        return {}, list(range(len(pending.request_ids)))  # vLLM raises the error
    tails, states, block_size = buffer._requests, worker._requests, buffer.block_size
    bounds = pending.query_start_loc.tolist()
    told = pending.token_starts.tolist(), pending.num_sampled.tolist(), pending.num_rejected.tolist()
    outputs: dict[str, Any] = {}
    left: list[int] = []
    taken, slots, places = [], [], []  # from where in `rows`, to which block, and to which row of it
    ended: list[tuple[str, Any, Any]] = []  # requests whose block became full
    batches: list[tuple[Any, list[tuple[int, np.ndarray]]]] = []  # what is published, and full blocks without a key
    for index, (name, position, sampled, rejected) in enumerate(zip(pending.request_ids, *told, strict=True)):
        state, tail, row = states[name], tails.get(name), bounds[index]
        expected = position if tail is None else tail.block_start + tail.length
        if (
            not position == expected == state.capture_cursor == state.emit_cursor
            or bounds[index + 1] != row + 1
            or sampled <= 0
            or rejected
            or (tail is None and position % block_size)
        ):
            left.append(index)
            continue
        if tail is None:
            tail = buffer._tail(name, position)
        taken.append(row)
        slots.append(tail.slot)
        places.append(tail.length)
        tail.length += 1
        state.capture_cursor = state.scheduled_cursor = state.emit_cursor = position + 1
        outputs[name] = AuxRequestOutput(position, rows[row : row + 1])
        if tail.length == block_size:
            ended.append((name, state, tail))
        elif state.pending_blocks:
            batches.append((state, []))
    if taken:
        buffer._rows[slots, places] = rows[taken]
    for name, state, tail in ended:
        block = buffer._rows[tail.slot]
        del tails[name]
        buffer._owned_slots[id(block)] = tail.slot
        batches.append((state, [(tail.block_start, block)]))
    if batches:
        worker._publish_blocks(batches)
    return outputs, left


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
