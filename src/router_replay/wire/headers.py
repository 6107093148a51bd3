"""Read the header of a blob and hold it to its codec: the payload must have the length that its rows take."""

from __future__ import annotations

from router_replay.errors import WireError
from router_replay.wire import dense, envelope, sets
from router_replay.wire.envelope import Header


def parse(view: memoryview, whole: bool = True) -> Header:
    """Parse and check the header of a blob. `whole` says that `view` is the whole blob, not only its header."""
    header = envelope.parse(view, whole)
    if header.codec == "sets" and header.spec.ordered:
        raise WireError(
            "codec: 'sets' does not keep the order of the slots, which has a meaning in this model "
            "(spec.ordered=True); expected 'dense'"
        )
    expected = (sets if header.codec == "sets" else dense).payload_length(header)
    if header.payload_length != expected:
        raise WireError(
            f"payload_length: {header.rows} rows of {header.spec.row_shape[0]} layers, {header.spec.top_k} of "
            f"{header.spec.num_experts} experts, take {expected} bytes with codec {header.codec!r}, "
            f"got {header.payload_length}"
        )
    return header
