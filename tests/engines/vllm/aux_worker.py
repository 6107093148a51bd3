"""The part of vLLM's worker that stores rows (from 0.31 on), real but without a model."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np


def storing(kind: type, row_shape: tuple[int, int], block: int, requests: int, tokens: int = 64) -> Any:
    """Return a worker part of this class, with vLLM's own buffer and store."""
    from vllm.distributed.aux_output_connector import routed_experts, store

    made = kind.__new__(kind)
    made._lock, made._requests, made._generation = threading.Lock(), {}, 0
    made._pending_outputs, made._max_concurrent_batches = [], 2
    made._store = store.BlockObjectStore(max_bytes=1 << 20, object_nbytes=block * row_shape[0] * row_shape[1])
    made._buffer = routed_experts.RoutedExpertsBuffer(np.dtype("uint8"), row_shape, block, requests, tokens, 2)
    return made


def begun(worker: Any, metadata: Any, names: list[str], starts: Any, bounds: Any, **told: np.ndarray) -> Any:
    """Give the worker a step, and return what it keeps of it until the step has ended."""
    from vllm.distributed.aux_output_connector.worker import PendingAuxOutput

    worker.begin_step(metadata)
    pending = PendingAuxOutput(worker, list(names), np.asarray(starts), np.asarray(bounds), None, **told)
    worker._pending_outputs.append(pending)
    for name in names:
        worker._requests[name].pending_outputs += 1
    return pending
