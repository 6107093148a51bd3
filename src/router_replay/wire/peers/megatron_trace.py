"""Megatron-core's router trace (`--moe-routing-trace-path`): a JSONL file per rank, a line per step and layer.

{"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 2, "topk": 2,
 "top_indices": [[5, 0], [2, 7]]}

Read in the source of its main branch; not run. `layer` is the number in the module's name, from 0 on, within the
process: with pipeline parallelism each rank counts from 0 again, and the trace does not say where its stage begins.
Lines of the block `mtp` (multi-token prediction) are left out: its routers are not those of the decoder.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from router_replay.errors import RoutesError, SpecError, WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire.peers.common import Count

_PEER = "Megatron router trace"


class _Line(msgspec.Struct):
    step: Count
    layer: Count
    top_indices: list[list[Count]]
    block: str = "decoder"


def from_megatron_trace(text: str | bytes, spec: RouterSpec) -> dict[int, Routes]:
    """Read the `text` of a trace file for the model of `spec`; return the rows of each step of the trace.

    The rows have the columns of the layers that the trace holds. If a layer has several lines in a step, their rows
    follow each other. Raises WireError with the line if the trace is not one, or does not fit the model.
    """
    steps: dict[int, dict[int, list[np.ndarray]]] = {}
    lines: list[Any] = [*text.splitlines()]
    for number, line in enumerate(lines, 1):
        if line.strip():
            one = _parsed(line, number)
            if one.block == "decoder":
                steps.setdefault(one.step, {}).setdefault(one.layer, []).append(_ids(one, spec, number))
    if not steps:
        raise WireError(f"{_PEER}: it has no line of a decoder layer")
    return {step: _routes(step, layers, spec) for step, layers in steps.items()}


def _parsed(line: Any, number: int) -> _Line:
    try:
        return msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"{_PEER}, line {number}: {error}") from error


def _ids(line: _Line, spec: RouterSpec, number: int) -> np.ndarray:
    widths = {len(row) for row in line.top_indices}
    if widths - {spec.top_k}:
        raise WireError(f"{_PEER}, line {number}: expected {spec.top_k} experts per token, got {sorted(widths)}")
    return np.array(line.top_indices, np.int64).reshape(-1, spec.top_k)


def _routes(step: int, layers: dict[int, list[np.ndarray]], spec: RouterSpec) -> Routes:
    try:
        own = spec.select(sorted(layers))
    except SpecError as error:
        raise WireError(
            f"{_PEER}, step {step}: {error}. With pipeline parallelism a rank counts its layers from 0"
        ) from error
    columns = [np.concatenate(layers[layer]) for layer in own.layers]
    rows = {len(column) for column in columns}
    if len(rows) != 1:
        raise WireError(f"{_PEER}, step {step}: expected equally many tokens in every layer, got {sorted(rows)}")
    try:
        return Routes(np.stack(columns, axis=1), own)
    except RoutesError as error:
        raise WireError(f"{_PEER}, step {step}: {error}") from error
