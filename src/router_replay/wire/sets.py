"""Codec `sets`: stores the rank of each captured set in ceil(log2 C(E, k)) bits, without gaps.

A row of 48 layers with 8 of 128 experts takes 48 * 41 bits = 246 bytes instead of 384. Only
captured rows are in the payload; the others decode as zeros. Slots decode in ascending order.

Shapes: T rows, L layers, K slots; N = captured rows * L sets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from router_replay import kernel
from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.runs import Runs
from router_replay.spec import RouterSpec
from router_replay.wire.envelope import CHECKSUM_BYTES, Header


def payload_length(header: Header) -> int:
    """Return the number of payload bytes for these rows; raise WireError if the header's field is far too small."""
    spec, sets = header.spec, header.captured_rows * len(header.spec.layers)
    if not sets:
        return 0
    # C(E, k) of a hostile header can have 65536 bits, so it is computed only if the payload is long enough for it.
    least = sets * kernel.least_rank_bits(spec.num_experts, spec.top_k) // 8
    if least > header.payload_length:
        raise WireError(
            f"payload_length: {sets} sets of {spec.top_k} of {spec.num_experts} experts take {least} bytes or more "
            f"with codec 'sets', got {header.payload_length}"
        )
    if header.seekable:
        return header.chunks.payload_length
    return (sets * kernel.rank_bits(spec.num_experts, spec.top_k) + 7) // 8


def refuse_slow(header: Header, most_steps: int, part: int | None = None) -> None:
    """Raise WireError if decoding the ranks takes more steps than `most_steps`, the limit for the blob's size.

    `part` is the number of ranks that are decoded, if these are not all.
    """
    spec, sets = header.spec, header.captured_rows * len(header.spec.layers) if part is None else part
    steps = kernel.unranking_steps(sets, spec.top_k, spec.num_experts)
    if steps > most_steps:
        raise WireError(
            f"unpacking {sets} sets of {spec.top_k} of {spec.num_experts} experts takes about {steps:,} steps, more "
            f"than the limit of {most_steps:,} for a blob of this size; if these are your model's numbers, pass "
            "decode(..., spec=)"
        )


def refuse_large(spec: RouterSpec, rows: int, blob_bytes: int, max_bytes: int) -> None:
    """Raise WireError if so many rows of ids take more than `max_bytes`."""
    if rows * spec.row_bytes > max_bytes:
        raise WireError(
            f"a blob of {blob_bytes} bytes would unpack to {rows} rows of {spec.row_bytes} bytes, more than the limit "
            f"of {max_bytes} bytes; if you trust the sender, pass decode(..., max_bytes={rows * spec.row_bytes})"
        )


def captured_sets(routes: Routes) -> np.ndarray:
    """Return the sets of the captured rows, [N, K]. Raises WireError if the order of the slots has a meaning."""
    spec = routes.spec
    if spec.ordered:
        raise WireError(
            "codec 'sets' does not keep the order of the slots, which has a meaning in this model "
            "(spec.ordered=True): use codec='dense'"
        )
    ids_TLK = routes.ids if routes.all_captured else routes.ids[routes.captured]
    return ids_TLK.reshape(-1, spec.top_k)


def encode(routes: Routes, threads: int) -> np.ndarray:
    """Return the payload: the ranks of the captured sets."""
    return kernel.encode_sets(captured_sets(routes), routes.spec.num_experts, threads)


def decode(view: memoryview, header: Header, threads: int, max_bytes: int) -> np.ndarray:
    """Return the ids [T, L, K]; uncaptured rows are zero.

    Raises WireError if the ids would take more than `max_bytes`, or if a rank encodes no set.
    """
    spec, known = header.spec, header.captured_rows
    refuse_large(spec, header.rows, len(view), max_bytes)
    payload = view[header.payload_offset : -CHECKSUM_BYTES]
    ids_NK = unpack(payload, known * len(spec.layers), spec, threads, lambda number: divmod(number, len(spec.layers)))
    return spread(ids_NK.reshape(known, *spec.row_shape), header.captured)


def unpack(
    payload: memoryview, count: int, spec: RouterSpec, threads: int, place: Callable[[int], tuple[int, int]]
) -> np.ndarray:
    """Return `count` sets of a bit stream of ranks, [N, K].

    `place` gives the captured row and the layer column of a set, for the WireError about a rank that encodes no set.
    """
    try:
        return kernel.decode_sets(payload, count, spec.top_k, spec.num_experts, spec.dtype, threads)
    except kernel.BadRank as error:
        row, column = place(error.number)
        raise WireError(f"captured row {row}, layer {spec.layers[column]}: {error}") from None
    except ValueError as error:
        raise WireError(f"payload: {error}") from None


def spread(captured_TLK: np.ndarray, captured: Runs) -> np.ndarray:
    """Return the ids of all rows of the runs, zeros in uncaptured rows, from the ids of the captured ones."""
    if len(captured_TLK) == len(captured):
        return captured_TLK
    ids_TLK = np.zeros((len(captured), *captured_TLK.shape[1:]), captured_TLK.dtype)
    taken = 0
    for start, end in captured.spans(True):
        ids_TLK[start:end] = captured_TLK[taken : taken + end - start]
        taken += end - start
    return ids_TLK
