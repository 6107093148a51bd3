"""Limits of what a blob may cost to unpack, so that a few hostile bytes cannot fill the memory or take minutes."""

from __future__ import annotations

from router_replay.arguments import exact_int
from router_replay.errors import WireError

FREE_BYTES = 256 << 20  # ids up to this size are decoded, whatever the size of the blob
FREE_EXPANSION = 64  # larger ids are decoded up to this many times the size of the blob
FREE_STEPS = 1 << 26  # limit on kernel.unranking_steps, about half a second, if the caller gave no spec
STEPS_PER_BYTE = 512  # steps allowed on top of that for each byte of the blob: a current model takes 2


def most_bytes(blob_bytes: int, max_bytes: int | None) -> int:
    """Return how many bytes of ids a blob of this size may unpack to; `max_bytes` is the caller's own limit."""
    if max_bytes is None:
        return max(FREE_BYTES, FREE_EXPANSION * blob_bytes)
    return exact_int(max_bytes, "max_bytes", WireError)


def most_steps(blob_bytes: int) -> int:
    """Return how many steps of unranking a blob of this size may take if the caller gave no spec."""
    return FREE_STEPS + STEPS_PER_BYTE * blob_bytes
