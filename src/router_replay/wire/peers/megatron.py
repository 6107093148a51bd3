"""Megatron-core's inference server: `choices[i].moe_topk_indices` is nested lists of ids, over the routed layers.

{"moe_topk_indices": [[[5, 0], [2, 7], [1, 4]], [[3, 6], [0, 1], [7, 2]]], "prompt_moe_topk_indices": [...]}

Read in the source of its main branch, in which the server has this field; 0.16.1, the newest release, does not. Not
run. There, the rows are those of the prompt and the completion without its last token. A row has one entry for each
router of the process that answers, in the order in which the model built them. So dense layers have no entry, unlike
in every other format here. Pipeline parallelism would leave entries out, and multi-token prediction would add some:
then the number of entries is another one than that of the spec, and reading raises. The server keeps zeros for a
token whose choice it never stored. With a top_k above 1 such a row is no set of experts, and raises too.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire.peers.common import Count, one_router_per_layer, parse, parse_json, refuse_missing, routes_of

_PEER = "Megatron"
_PLACE = "Megatron moe_topk_indices"


class _Choice(msgspec.Struct):
    moe_topk_indices: Any = None
    prompt_moe_topk_indices: Any = None


def from_megatron(obj: Any, spec: RouterSpec, *, allow_zero_layers: bool = False) -> Routes:
    """Read one choice `obj` of Megatron's server for the model of `spec`.

    `obj` is `choices[i]` as a dict or as JSON, the value of its `moe_topk_indices`, or in the server's process the
    array `routing_indices` of a request. `allow_zero_layers` accepts layers whose rows are all expert 0, as in
    `Routes.from_engine`.
    """
    one_router_per_layer(spec, _PLACE)
    found = parse_json(obj, _PEER)
    rows, prompt = found, None
    if isinstance(found, dict):
        if "choices" in found:
            raise WireError(f"{_PLACE}: expected one choice, got a whole response: pass its choices[i]")
        choice = parse(found, _Choice, _PEER)
        rows, prompt = choice.moe_topk_indices, choice.prompt_moe_topk_indices
        if rows is None:
            raise WireError(
                f"{_PLACE}: not in this choice; the server returns it only if its model was built with "
                "moe_enable_routing_replay=True"
            )
    array_TLK = _array(rows, spec, _PLACE)
    if prompt is not None:
        own = _array(prompt, spec, "Megatron prompt_moe_topk_indices")
        if not np.array_equal(own, array_TLK[: len(own)]):
            raise WireError(
                f"Megatron prompt_moe_topk_indices: expected the first {len(own)} of {len(array_TLK)} rows of "
                "moe_topk_indices, got others"
            )
    array_TAK = np.zeros((len(array_TLK), spec.engine_layers, array_TLK.shape[2]), array_TLK.dtype)
    array_TAK[:, list(spec.layers)] = array_TLK
    return routes_of(array_TAK, spec, _PLACE, allow_zero_layers=allow_zero_layers)


def to_megatron(routes: Routes) -> dict[str, Any]:
    """Write `routes` as the field that Megatron's server adds to a choice."""
    one_router_per_layer(routes.spec, _PLACE)
    refuse_missing(routes, _PLACE)
    return {"moe_topk_indices": routes.ids.tolist()}


def _array(rows: Any, spec: RouterSpec, place: str) -> np.ndarray:
    """Return the rows as [T, L, K]; raise WireError if they are no lists of equal lengths, one per routed layer."""
    if isinstance(rows, np.ndarray):
        array = rows
    else:
        try:
            array = np.array(msgspec.convert(rows, list[list[list[Count]]]), np.int64)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"{place}: expected lists [rows][routed layers][slots] of ids: {error}") from error
        if array.shape == (0,):  # no rows: the lengths of the others are not known
            array = array.reshape(0, len(spec.layers), spec.top_k)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise WireError(
            f"{place}: expected integers [rows, routed layers, slots], got {array.dtype} {list(array.shape)}"
        )
    if array.shape[1:] != spec.row_shape:
        raise WireError(
            f"{place}: expected {len(spec.layers)} routed layers (dense ones have no entry) of {spec.top_k} slots, got "
            f"{array.shape[1]} of {array.shape[2]}: fewer layers come from a server with pipeline parallelism, more "
            "from multi-token prediction or another model"
        )
    return array
