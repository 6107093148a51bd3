"""The envelope of a blob: its header (model, tokens, captured rows, versions) and its checksums.

    version 1            | fixed, 64 bytes | runs, digest, layers, zeros to 16 | payload | XXH3-64 of all before |
    version 2, seekable  | fixed, 64 bytes | runs, digest, layers, chunk sums, zeros, XXH3-64 of the header | payload |

The reader does not trust the header: every length is checked against the bytes present before anything is
allocated, and each header has exactly one valid encoding. docs/wire_format.md is the normative text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from router_replay.arguments import int64_array
from router_replay.errors import SpecError, WireError
from router_replay.runs import Runs
from router_replay.spec import RouterSpec
from router_replay.wire.chunks import Chunks

MAGIC = b"\x89RRW\r\n\x1a\n"  # like PNG's: not valid text, and damaged by any conversion of line ends
PLAIN, SEEKABLE = FORMAT_VERSIONS = (1, 2)
CODECS = ("dense", "sets")  # the codec field is the index into this tuple
ALIGNMENT = 16  # of the payload, from the start of the blob
MAX_ROWS = 1 << 40  # also the limit for start
CHECKSUM_BYTES = 8
DIGEST_BYTES = 16

ORDERED, HAS_VERSIONS, HAS_DIGEST, FIRST_ROW_CAPTURED = 1, 2, 4, 8
KNOWN_FLAGS = 15

# magic, format version, codec, flags, header length, experts, top k, decoder layers (0: unknown), routed layers,
# rows, start, payload length, captured runs, version runs
_FIXED = struct.Struct("<8sHBBIIIIIQQQII")
FIXED_BYTES = _FIXED.size


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The description of a blob's rows.

    `spec` is the RouterSpec of the model. `codec` is "dense" or "sets". `rows` is the number of rows, and `start` the
    position of row 0 in its sequence of tokens. `captured` and `versions` are runs over the rows; `versions` is None
    if the blob has none. `token_digest` is the XXH3-128 of the token ids, or None. `payload_length` is in bytes.
    `chunk_sums` are the XXH3-64 of the chunks of a seekable blob, 8 bytes each; None if the blob is not seekable.
    """

    spec: RouterSpec
    codec: str
    rows: int
    start: int
    captured: Runs
    versions: Runs | None
    token_digest: bytes | None
    payload_length: int
    chunk_sums: bytes | None = None

    @property
    def seekable(self) -> bool:
        """Whether parts of the blob can be read alone, with `wire.Reader`."""
        return self.chunk_sums is not None

    @property
    def has_token_digest(self) -> bool:
        """Whether the blob has the digest of its tokens."""
        return self.token_digest is not None

    @property
    def captured_rows(self) -> int:
        """The number of captured rows."""
        return sum(end - start for start, end in self.captured.spans(True))

    @property
    def chunks(self) -> Chunks:
        """Where rows and layers lie in the payload of a seekable blob."""
        return Chunks(self.spec, self.codec, self.captured_rows if self.codec == "sets" else self.rows)

    @property
    def payload_offset(self) -> int:
        """The position of the payload's first byte in the blob, a multiple of 16."""
        versions = 0 if self.versions is None else len(self.versions.ends)
        used = _tail_end(len(self.captured.ends), versions, self.has_token_digest, len(self.spec.layers))
        return _aligned(used if self.chunk_sums is None else used + len(self.chunk_sums) + CHECKSUM_BYTES)


def as_bytes(blob: Any) -> memoryview:
    """Return a flat memoryview of the bytes of `blob`."""
    try:
        view = memoryview(blob)
    except TypeError:
        raise WireError(
            f"a blob must be bytes, bytearray, memoryview or mmap, got {type(blob).__name__}; "
            "for text of another project use its reader, such as wire.from_vllm"
        ) from None
    if not view.contiguous:
        raise WireError("a blob must be contiguous in memory, got a memoryview with gaps; pass bytes(view)")
    return view.cast("B") if view.nbytes else memoryview(b"")


# -- writing ----------------------------------------------------------------------------------------


def seal(header: Header, payload: Any) -> bytes:
    """Concatenate header, payload and checksum into one blob."""
    front = _write(header)
    if header.seekable:
        return b"".join((front, payload))
    checksum = xxhash.xxh3_64(front)
    checksum.update(payload)
    return b"".join((front, payload, checksum.intdigest().to_bytes(CHECKSUM_BYTES, "little")))


def _write(header: Header) -> bytes:
    spec, versions, captured = header.spec, header.versions, header.captured
    if max(header.rows, header.start) > MAX_ROWS:
        raise WireError(f"rows and start must not exceed 2**40, got {header.rows} and {header.start}")
    if max(spec.layers[-1], spec.num_layers or 0) >= 1 << 32:
        raise WireError(
            f"layer ids and num_layers must be below 2**32, got layer {spec.layers[-1]}, num_layers={spec.num_layers}"
        )
    flags = (ORDERED if spec.ordered else 0) | (HAS_VERSIONS if versions is not None else 0)
    flags |= HAS_DIGEST if header.has_token_digest else 0
    flags |= FIRST_ROW_CAPTURED if header.rows and captured.values[0] else 0
    fixed = _FIXED.pack(
        MAGIC,
        SEEKABLE if header.seekable else PLAIN,
        CODECS.index(header.codec),
        flags,
        header.payload_offset,
        spec.num_experts,
        spec.top_k,
        spec.num_layers or 0,
        len(spec.layers),
        header.rows,
        header.start,
        header.payload_length,
        len(captured.ends),
        0 if versions is None else len(versions.ends),
    )
    parts = [fixed, _lengths(captured).astype("<u8").tobytes()]
    if versions is not None:
        pairs = np.stack([np.array(versions.values, "<u8"), _lengths(versions)], axis=1)
        parts.append(pairs.astype("<u8").tobytes())
    parts += [header.token_digest or b"", np.array(spec.layers, "<u4").tobytes(), header.chunk_sums or b""]
    front = b"".join(parts)
    if not header.seekable:
        return front + bytes(header.payload_offset - len(front))
    front += bytes(header.payload_offset - len(front) - CHECKSUM_BYTES)
    return front + xxhash.xxh3_64_intdigest(front).to_bytes(CHECKSUM_BYTES, "little")


def _lengths(runs: Runs) -> np.ndarray:
    lengths = np.array(runs.ends, np.uint64)
    lengths[1:] -= lengths[:-1].copy()  # np.diff takes five times as long, for the one run that most routes have
    return lengths


def _tail_end(captured_runs: int, version_runs: int, digest: bool, layers: int) -> int:
    """Return the position after the layers, with which the header of version 1 ends but for its padding."""
    return FIXED_BYTES + 8 * captured_runs + 16 * version_runs + DIGEST_BYTES * digest + 4 * layers


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


# -- reading ----------------------------------------------------------------------------------------


def parse(view: memoryview, whole: bool = True) -> Header:
    """Parse the header and check that it is canonical and that the lengths add up.

    `whole` says that `view` is the whole blob, not only its header. The checksum of the payload is not verified; the
    header of a seekable blob has a checksum of its own, which is.
    """
    fields = _fixed(view)
    (_, version, codec, flags, length, experts, top_k, num_layers, layer_count), rest = fields[:9], fields[9:]
    rows, start, payload_length, captured_count, version_count = rest
    if codec >= len(CODECS):
        raise WireError(f"codec: expected 0 (dense) or 1 (sets), got {codec}")
    if flags & ~KNOWN_FLAGS:
        raise WireError(f"flags: reserved bits must be zero, got {flags:#04x}")
    if max(rows, start) > MAX_ROWS:
        raise WireError(f"rows and start must not exceed 2**40, got {rows} and {start}")
    layers_end = _tail_end(captured_count, version_count, bool(flags & HAS_DIGEST), layer_count)
    seekable = version == SEEKABLE
    least = _aligned(layers_end + CHECKSUM_BYTES if seekable else layers_end)
    if length < least or length % ALIGNMENT or (length > least and not seekable):
        raise WireError(f"header length: expected {least} bytes from the counts in the header, got {length}")
    end = length + payload_length + (0 if seekable else CHECKSUM_BYTES)
    if (end != len(view)) if whole else (length != len(view)):
        raise WireError(
            f"length: expected {end if whole else length} bytes from the header, got {len(view)}: "
            "the blob was truncated, or bytes were appended to it"
        )
    if seekable:
        check_sum(view[:length])
    captured_end = FIXED_BYTES + 8 * captured_count
    versions_end = captured_end + 16 * version_count
    digest_end = versions_end + (DIGEST_BYTES if flags & HAS_DIGEST else 0)
    layers = bytes(view[digest_end:layers_end])
    read_spec = _spec if layer_count <= 1024 else _spec.__wrapped__  # keep large specs out of the cache
    header = Header(
        spec=read_spec(experts, top_k, layers, bool(flags & ORDERED), num_layers),
        codec=CODECS[codec],
        rows=rows,
        start=start,
        captured=_captured(view[FIXED_BYTES:captured_end], bool(flags & FIRST_ROW_CAPTURED), rows),
        versions=_versions(view[captured_end:versions_end], bool(flags & HAS_VERSIONS), rows),
        token_digest=bytes(view[versions_end:digest_end]) if flags & HAS_DIGEST else None,
        payload_length=payload_length,
    )
    used = layers_end
    if seekable:
        used += CHECKSUM_BYTES * header.chunks.count
        header = dataclasses.replace(header, chunk_sums=bytes(view[layers_end:used]))
        if length != header.payload_offset or len(header.chunk_sums or b"") != used - layers_end:
            raise WireError(
                f"header length: expected {_aligned(used + CHECKSUM_BYTES)} bytes with {header.chunks.count} chunk "
                f"checksums, got {length}"
            )
    if any(view[used : length - (CHECKSUM_BYTES if seekable else 0)]):
        raise WireError("header padding: expected zeros, got other bytes")
    return header


def header_length(fixed: memoryview) -> int:
    """Return the length of the header of a seekable blob, given its first 64 bytes; raise WireError for another."""
    fields = _fixed(fixed, FIXED_BYTES)
    if fields[1] != SEEKABLE:
        raise WireError("the blob is not seekable: write it with encode(..., seekable=True), or use wire.decode")
    length: int = fields[4]
    return length


def _fixed(view: memoryview, least: int = FIXED_BYTES + CHECKSUM_BYTES) -> tuple[Any, ...]:
    """Return the fields of the fixed header, of a format version that this reader knows."""
    if view[: len(MAGIC)] != MAGIC:
        raise WireError(f"magic: this is not a blob of Router Replay: expected {MAGIC!r}, got {bytes(view[:8])!r}")
    if len(view) < least:
        raise WireError(f"truncated: expected {least} bytes or more, got {len(view)}")
    fields = _FIXED.unpack_from(view)
    if fields[1] not in FORMAT_VERSIONS:
        known = " and ".join(map(str, FORMAT_VERSIONS))
        raise WireError(f"format version: this reader knows {known}, got {fields[1]}; update router-replay")
    return fields


@functools.lru_cache(maxsize=64)
def _spec(experts: int, top_k: int, layers: bytes, ordered: bool, num_layers: int) -> RouterSpec:
    """Make the spec, cached: a process reads many blobs of few models, and a check costs as much as hashing 1 MB."""
    try:
        return RouterSpec(experts, top_k, tuple(np.frombuffer(layers, "<u4").tolist()), ordered, num_layers or None)
    except SpecError as error:
        raise WireError(f"spec: {error}") from None


def _captured(field: memoryview, first: bool, rows: int) -> Runs:
    """Read the alternating runs of captured and uncaptured rows; `first` is the value of the first run."""
    ends = _ends(np.frombuffer(field, "<u8"), rows, "captured runs")
    if first and not rows:
        raise WireError("flags: the first row is marked as captured, but the blob has no rows")
    return Runs([(number % 2 == 0) == first for number in range(len(ends))], ends)


def _versions(field: memoryview, present: bool, rows: int) -> Runs | None:
    if not present:
        if len(field):
            raise WireError(f"version runs: expected none, since the flag for them is 0, got {len(field) // 16}")
        return None
    pairs = np.frombuffer(field, "<u8").reshape(-1, 2)
    ends, values = _ends(pairs[:, 1], rows, "version runs"), pairs[:, 0]
    if len(values) and int(values.max()) >= 1 << 63:
        raise WireError(f"version runs: a policy version must be below 2**63, got {values.max()}")
    if (values[1:] == values[:-1]).any():
        raise WireError("version runs: two neighbouring runs have the same version; expected them as one run")
    return Runs(values.tolist(), ends)


def _ends(lengths: np.ndarray, rows: int, name: str) -> list[int]:
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > rows):
        raise WireError(f"{name}: a run must have 1 to {rows} rows, got {lengths.min()} to {lengths.max()}")
    ends = list(itertools.accumulate(lengths.tolist()))
    total = ends[-1] if ends else 0
    if total != rows:
        raise WireError(f"{name}: expected {rows} rows in all runs together, got {total}")
    return ends


# -- checksum and digest ----------------------------------------------------------------------------


def check_sum(view: memoryview, computed: int | None = None) -> None:
    """Raise WireError unless the last 8 bytes are the XXH3-64 of all bytes before them."""
    if computed is None:
        computed = xxhash.xxh3_64_intdigest(view[:-CHECKSUM_BYTES])
    stored = int.from_bytes(view[-CHECKSUM_BYTES:], "little")
    if computed != stored:
        raise WireError(
            f"checksum: the blob was damaged or changed: expected {stored:#018x}, got {computed:#018x}; send it again"
        )


def digest_of(token_ids: Sequence[int] | Any, end: int) -> bytes:
    """Return the XXH3-128 of the token ids as little-endian int64; raise WireError if there are fewer than `end`."""
    tokens = int64_array(token_ids, "token_ids", WireError)
    if end > len(tokens):
        raise WireError(
            f"token_ids: expected the whole sequence, {end} tokens or more since the rows end at position {end}, "
            f"got {len(tokens)}"
        )
    return xxhash.xxh3_128_intdigest(tokens.astype("<i8").tobytes()).to_bytes(DIGEST_BYTES, "little")


def check_digest(header: Header, token_ids: Sequence[int] | Any) -> None:
    """Raise WireError unless the rows belong to these tokens."""
    if header.token_digest is None:
        raise WireError("token_ids were given, but the blob has no token digest: pass token_ids= to encode as well")
    digest = digest_of(token_ids, header.start + header.rows)
    if digest != header.token_digest:
        raise WireError(
            f"token digest: these routes belong to other tokens: expected {header.token_digest.hex()}, "
            f"got {digest.hex()} for the {len(token_ids)} given tokens"
        )
