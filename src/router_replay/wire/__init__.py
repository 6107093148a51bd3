"""Conversion of routes to bytes and back, and the formats of other projects. docs/wire_format.md is the byte spec.

    blob = wire.encode(routes, token_ids=prompt_and_completion)    # 0.63 of the raw ids for 8 of 128 experts
    routes = wire.decode(blob, token_ids=prompt_and_completion)    # checksum, digest and every row checked

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_replay.arguments import exact_int
from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.row_checks import is_immutable
from router_replay.spec import RouterSpec
from router_replay.wire import dense, envelope, headers, limits, sets
from router_replay.wire import seekable as seekable_form
from router_replay.wire.envelope import Header
from router_replay.wire.peers import (
    from_dynamo,
    from_megatron,
    from_megatron_trace,
    from_nemo,
    from_prime_rl,
    from_sglang,
    from_skyrl,
    from_vllm,
    peer_start,
    to_dynamo,
    to_megatron,
    to_nemo,
    to_prime_rl,
    to_sglang,
    to_skyrl,
    to_vllm,
)
from router_replay.wire.seekable import Reader

__all__ = ["Header", "Reader", "decode", "encode", "peer_start", "read_header"]
__all__ += ["from_dynamo", "from_megatron", "from_nemo", "from_prime_rl", "from_sglang", "from_skyrl", "from_vllm"]
__all__ += ["from_megatron_trace"]
__all__ += ["to_dynamo", "to_megatron", "to_nemo", "to_prime_rl", "to_sglang", "to_skyrl", "to_vllm"]


def encode(
    routes: Routes,
    codec: str = "sets",
    token_ids: Sequence[int] | Any = None,
    start: int = 0,
    threads: int = 1,
    seekable: bool = False,
) -> bytes:
    """Encode routes as one self-describing, checksummed blob.

    The codec `sets` writes the rank of each set in ceil(log2 C(E, k)) bits and decodes with sorted slots;
    `dense` writes the raw ids and decodes as a view. `start` is the position of row 0 in its sequence.
    `token_ids` are those of the whole sequence: their digest is stored in the blob, so that a reader that
    has the tokens can verify that the rows belong to them. `threads` is the number of threads; only `sets` uses it.
    `seekable` writes format version 2, of which a `Reader` can read single rows and layers; it is at most 1 % larger
    for 1,024 rows or more of 16 layers or more. Raises WireError if `routes` cannot be written with this codec.
    """
    if codec not in envelope.CODECS:
        raise WireError(f"codec must be one of {', '.join(map(repr, envelope.CODECS))}, got {codec!r}")
    start = exact_int(start, "start", WireError)
    threads = exact_int(threads, "threads", WireError)
    sums = None
    if seekable:
        payload, sums = seekable_form.encode(routes, codec, threads)
    else:
        payload = sets.encode(routes, threads) if codec == "sets" else dense.encode(routes)
    header = Header(
        spec=routes.spec,
        codec=codec,
        rows=len(routes),
        start=start,
        captured=routes.captured_runs,
        versions=routes.version_runs,
        token_digest=None if token_ids is None else envelope.digest_of(token_ids, start + len(routes)),
        payload_length=len(payload),
        chunk_sums=sums,
    )
    return envelope.seal(header, payload)


def decode(
    blob: Any,
    token_ids: Sequence[int] | Any = None,
    spec: RouterSpec | None = None,
    threads: int = 1,
    max_bytes: int | None = None,
    check_rows: bool = True,
) -> Routes:
    """Decode a `blob` (bytes, bytearray, memoryview or mmap); raise WireError with the reason if it is invalid.

    `token_ids` are those of the whole sequence; if given, the blob must carry their digest. `spec` is the
    model's, if the caller knows it. Every captured row is checked for range and repeated experts. `threads` is the
    number of threads; only a `sets` blob uses it.

    A `dense` blob decodes as a read-only view, which keeps the blob alive; a blob that other code can
    still write to, such as a bytearray, is copied first. A `sets` blob is unpacked into at most
    `max_bytes`; the default is 256 MiB or 64 times the size of the blob, whichever is more, so
    that a few hostile bytes cannot fill the memory. Without a `spec`, a blob is refused if its numbers of
    experts and slots make unpacking slow for its size.

    `check_rows=False` skips the row check of a `dense` blob, for blobs that are known to be written by
    this package: it writes checked rows only, and the checksum, which is always verified, shows
    that they arrived as written. With many slots per row the check can cost as much as a copy.
    """
    threads = exact_int(threads, "threads", WireError)
    view = envelope.as_bytes(blob)
    header = headers.parse(view)
    if spec is not None and spec != header.spec:
        raise WireError(f"the blob holds routes of another model: expected {spec}, got {header.spec}")
    if token_ids is not None:
        envelope.check_digest(header, token_ids)
    if header.seekable:
        return Reader(view, spec).read(threads=threads, max_bytes=max_bytes, check_rows=check_rows)
    if header.codec == "dense":
        if not is_immutable(view):
            view = memoryview(bytes(view))
        ids = dense.decode(view, header, check_rows)
    else:
        envelope.check_sum(view)
        if spec is None:
            sets.refuse_slow(header, limits.most_steps(len(view)))
        ids = sets.decode(view, header, threads, limits.most_bytes(len(view), max_bytes))
    known = header.spec if spec is None or header.spec.num_layers is not None else spec
    return Routes.trusted(ids, known, header.captured, header.versions)


def read_header(blob: Any) -> Header:
    """Read the header of a `blob` without unpacking its rows. The checksums of the whole blob are verified."""
    view = envelope.as_bytes(blob)
    header = headers.parse(view)
    if header.seekable:
        Reader(view).check()
    else:
        envelope.check_sum(view)
    return header
