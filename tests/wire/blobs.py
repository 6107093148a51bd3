"""Makers of specs, routes and forged blobs for the tests of the wire."""

from __future__ import annotations

import struct
from typing import Any

import hypothesis.strategies as st
import numpy as np
import xxhash

from router_replay import RouterSpec, Routes

# where the fields of the fixed header stand: (offset, struct format)
FIELDS = {
    "format_version": (8, "<H"),
    "codec": (10, "<B"),
    "flags": (11, "<B"),
    "header_length": (12, "<I"),
    "num_experts": (16, "<I"),
    "top_k": (20, "<I"),
    "num_layers": (24, "<I"),
    "layer_count": (28, "<I"),
    "rows": (32, "<Q"),
    "start": (40, "<Q"),
    "payload_length": (48, "<Q"),
    "captured_runs": (56, "<I"),
    "version_runs": (60, "<I"),
}


def sealed(blob: bytes | bytearray) -> bytes:
    """The blob with a checksum that is right: what a forger would send."""
    body = bytes(blob[:-8])
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def forged(blob: bytes, **fields: int) -> bytes:
    """The blob with other values in its fixed header, and a right checksum."""
    changed = bytearray(blob)
    for name, value in fields.items():
        offset, form = FIELDS[name]
        struct.pack_into(form, changed, offset, value)
    return sealed(changed)


def patched(blob: bytes, offset: int, data: bytes) -> bytes:
    """The blob with other bytes at an offset (from the end where negative), and a right checksum."""
    changed = bytearray(blob)
    offset += len(blob) if offset < 0 else 0
    changed[offset : offset + len(data)] = data
    return sealed(changed)


def spec_of(experts: int, k: int, layers: int = 2, **more: Any) -> RouterSpec:
    return RouterSpec(experts, k, tuple(range(layers)), **more)


def random_routes(rows: int, spec: RouterSpec, seed: int = 0) -> Routes:
    """Fully captured rows, experts in random slot order."""
    scores = np.random.default_rng(seed).random((rows, len(spec.layers), spec.num_experts))
    return Routes(np.argsort(scores, axis=-1)[..., : spec.top_k].astype(spec.dtype), spec)


@st.composite
def specs(draw: st.DrawFn, ordered: bool | None = None) -> RouterSpec:
    """Any model: one expert to 65536, few slots or nearly all, layers with gaps and twice the same."""
    experts = draw(st.sampled_from([1, 2, 8, 60, 128, 255, 256, 257, 384, 512, 65536]) | st.integers(1, 65536))
    few = st.integers(1, min(experts, 24))
    most = st.integers(max(1, experts - 4), experts) if experts <= 2048 else few
    middle = st.integers(1, experts) if experts <= 300 else few
    k = draw(few | most | middle)
    layers = tuple(sorted(draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))))
    known = draw(st.none() | st.integers(layers[-1] + 1, 100))
    is_ordered = draw(st.booleans()) if ordered is None else ordered
    return RouterSpec(experts, k, layers, ordered=is_ordered, num_layers=known)


@st.composite
def routes_of(draw: st.DrawFn, spec: RouterSpec, max_rows: int = 12) -> Routes:
    rows = draw(st.integers(0, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sets = [rng.choice(spec.num_experts, spec.top_k, replace=False) for _ in range(rows * len(spec.layers))]
    ids = np.array(sets, spec.dtype).reshape(rows, *spec.row_shape)
    captured = draw(st.none() | st.lists(st.booleans(), min_size=rows, max_size=rows).map(lambda m: np.array(m, bool)))
    version = st.integers(0, 2**63 - 1) | st.integers(0, 2)
    versions = draw(st.none() | st.lists(version, min_size=rows, max_size=rows).map(lambda v: np.array(v, np.int64)))
    return Routes(ids, spec, captured=captured, versions=versions)
