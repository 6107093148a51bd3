"""The seekable form of a blob: any rows and layers can be read without the bytes of the others.

    blob = wire.encode(routes, seekable=True)
    reader = wire.Reader(blob)                          # or a function that returns the bytes [start, end) of a blob
    share = reader.read(4096, 8192, layers=(10, 11))    # Routes; only their chunks are read, checked and unpacked

Shapes: T rows, L layers, K slots; N = rows * layers sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from router_replay import kernel
from router_replay.arguments import exact_int
from router_replay.errors import SpecError, WireError
from router_replay.routes import Routes
from router_replay.row_checks import is_immutable
from router_replay.runs import Runs
from router_replay.spec import RouterSpec
from router_replay.wire import dense, envelope, headers, limits, sets
from router_replay.wire.chunks import Chunks
from router_replay.wire.envelope import Header

# -- writing ----------------------------------------------------------------------------------------


def encode(routes: Routes, codec: str, threads: int) -> tuple[Any, bytes]:
    """Return the payload of these routes, and the checksums of its chunks."""
    stored = len(routes) if codec == "dense" else sum(end - start for start, end in routes.captured_runs.spans(True))
    chunks = Chunks(routes.spec, codec, stored)
    payload = dense.encode(routes) if codec == "dense" else _encode_sets(routes, chunks, threads)
    view = envelope.as_bytes(payload)
    sums = []
    for block in range(chunks.blocks):
        sums += [xxhash.xxh3_64_intdigest(view[start:end]) for start, end in chunks.spans(block)]
    return payload, np.array(sums, "<u8").tobytes()


def _encode_sets(routes: Routes, chunks: Chunks, threads: int) -> np.ndarray:
    """Return the ranks, chunk by chunk. The chunks of full blocks are one bit stream, because each fills its bytes."""
    spec, ids_NK = routes.spec, sets.captured_sets(routes)
    full = chunks.rows // chunks.block_rows
    ids_TLK = ids_NK.reshape(-1, *spec.row_shape)
    blocks_BTLK = ids_TLK[: full * chunks.block_rows].reshape(full, chunks.block_rows, *spec.row_shape)
    ordered = np.empty((full, chunks.block_rows * len(spec.layers), spec.top_k), ids_NK.dtype)
    taken = 0
    for group in chunks.groups:
        count = chunks.block_rows * len(group)
        part = ordered[:, taken : taken + count].reshape(full, chunks.block_rows, len(group), spec.top_k)
        part[:] = blocks_BTLK[:, :, group.start : group.stop]
        taken += count
    parts = [kernel.encode_sets(ordered.reshape(-1, spec.top_k), spec.num_experts, threads)]
    rest_TLK = ids_TLK[full * chunks.block_rows :]
    for group in chunks.groups if len(rest_TLK) else ():
        rest_NK = rest_TLK[:, group.start : group.stop].reshape(-1, spec.top_k)
        parts.append(kernel.encode_sets(rest_NK, spec.num_experts, threads))
    return np.concatenate(parts)


# -- reading ----------------------------------------------------------------------------------------


class Reader:
    """Read parts of one seekable blob.

    `source` is the blob, or a function `read(start, end)` that returns these bytes of it: a range request, or a call of
    the process that holds the blob. `spec` is the model's, if the caller knows it. `header` describes the blob, and
    `bytes_read` counts the bytes that were read so far. Raises WireError if the blob is invalid, or not seekable.
    """

    def __init__(self, source: Any, spec: RouterSpec | None = None) -> None:
        self.bytes_read = 0
        self._source: Callable[[int, int], Any] = source if callable(source) else _slices(source)
        self._known_model = spec is not None
        fixed = self._bytes(0, envelope.FIXED_BYTES)
        front = bytes(fixed) + bytes(self._bytes(len(fixed), max(envelope.header_length(fixed), len(fixed))))
        self.header: Header = headers.parse(memoryview(front), whole=False)
        if spec is not None and spec != self.header.spec:
            raise WireError(f"the blob holds routes of another model: expected {spec}, got {self.header.spec}")
        self._spec = self.header.spec if spec is None or self.header.spec.num_layers is not None else spec
        self._chunks = self.header.chunks

    def __len__(self) -> int:
        return self.header.rows

    def read(
        self,
        first: int = 0,
        last: int | None = None,
        layers: Iterable[int] | None = None,
        threads: int = 1,
        max_bytes: int | None = None,
        check_rows: bool = True,
    ) -> Routes:
        """Return the rows from `first` up to but without `last` (default: all), of these `layers` (default: all).

        Row 0 is the first row of the blob. Layers are absolute ids, ascending. Only the chunks of these rows and layers
        are read; their checksums and their captured rows are checked. `threads`, `max_bytes` and `check_rows` mean the
        same as in `decode`.
        """
        header = self.header
        first = exact_int(first, "first", WireError, most=header.rows)
        last = header.rows if last is None else exact_int(last, "last", WireError, least=first, most=header.rows)
        try:
            spec = self._spec if layers is None else self._spec.select(layers)
        except SpecError as error:
            raise WireError(f"layers: {error}") from None
        columns = [column for column, layer in enumerate(header.spec.layers) if layer in spec.layers]
        captured = header.captured.slice(first, last)
        if header.codec == "dense":
            ids_TLK = self._dense(first, last, captured if check_rows else Runs((), ()))
            ids_TLK = ids_TLK if layers is None else ids_TLK[:, columns]
        else:
            size = header.payload_offset + header.payload_length
            sets.refuse_large(spec, last - first, size, limits.most_bytes(size, max_bytes))
            before = header.captured.slice(0, first)
            ids_TLK = sets.spread(self._sets(_count(before), _count(captured), columns, threads), captured)
        versions = None if header.versions is None else header.versions.slice(first, last)
        return Routes.trusted(ids_TLK, spec, captured, versions)

    def check(self) -> None:
        """Read the whole blob and verify its checksums, without unpacking it."""
        self._checked(range(self._chunks.blocks), slice(None))

    def _dense(self, first: int, last: int, captured: Runs) -> np.ndarray:
        """Return the ids of these rows as a view of what was read."""
        spec, size = self.header.spec, self._chunks.block_rows
        blocks = range(first // size, -(-last // size) if last > first else first // size)
        data = self._checked(blocks, slice(None))
        stored = np.frombuffer(data, spec.dtype.newbyteorder("<")).astype(spec.dtype, copy=False)
        ids_TLK = stored.reshape(-1, *spec.row_shape)[first - blocks.start * size :][: last - first]
        dense.check(ids_TLK, captured, spec, first)
        return ids_TLK

    def _sets(self, first: int, count: int, columns: list[int], threads: int) -> np.ndarray:
        """Return these layer columns of `count` captured rows, the first of which is captured row `first`."""
        spec, chunks = self.header.spec, self._chunks
        if not count:
            return np.zeros((0, len(columns), spec.top_k), spec.dtype)
        size, width = chunks.block_rows, len(chunks.groups[0])
        groups = slice(columns[0] // width, columns[-1] // width + 1)
        blocks = range(first // size, -(-(first + count) // size))
        if not self._known_model:
            found = sum(map(chunks.rows_of, blocks)) * sum(map(len, chunks.groups[groups]))
            sets.refuse_slow(self.header, limits.most_steps(self.header.payload_length), found)
        full = min(blocks.stop, chunks.rows // size)  # the first block with fewer rows, if it is among them
        runs = (range(blocks.start, full), range(max(full, blocks.start), blocks.stop))
        parts = [self._unpack(run, groups, threads) for run in runs if run]
        ids_TLK = (parts[0] if len(parts) == 1 else np.concatenate(parts))[first - blocks.start * size :][:count]
        base = chunks.groups[groups][0].start
        taken = [column - base for column in columns]
        return ids_TLK if len(taken) == ids_TLK.shape[1] else ids_TLK[:, taken]

    def _unpack(self, blocks: range, groups: slice, threads: int) -> np.ndarray:
        """Return all rows of these blocks, which have the same number of rows, and all layers of these groups."""
        spec, chunks = self.header.spec, self._chunks
        wanted, rows = chunks.groups[groups], chunks.rows_of(blocks.start)
        data, base = self._checked(blocks, groups), wanted[0].start
        ids_BTLK = np.empty((len(blocks), rows, wanted[-1].stop - base, spec.top_k), spec.dtype)
        # The chunks of full blocks fill their bytes, so that all of them are one bit stream.
        streams = [wanted] if rows % 8 == 0 else [[group] for group in wanted]
        start = 0
        for stream in streams:
            sizes = [rows * len(group) for group in stream]
            count = len(blocks) * sum(sizes)
            end = start + (count * kernel.rank_bits(spec.num_experts, spec.top_k) + 7) // 8

            def place(number: int, stream: list[range] = stream, size: int = sum(sizes)) -> tuple[int, int]:
                block, number = divmod(number, size)
                group = next(group for group in stream if number < rows * (group.stop - stream[0].start))
                row, column = divmod(number - rows * (group.start - stream[0].start), len(group))
                return (blocks.start + block) * chunks.block_rows + row, group.start + column

            ids_BNK = sets.unpack(data[start:end], count, spec, threads, place).reshape(len(blocks), -1, spec.top_k)
            taken = 0
            for group, size in zip(stream, sizes, strict=True):
                part_BTLK = ids_BNK[:, taken : taken + size].reshape(len(blocks), rows, len(group), spec.top_k)
                ids_BTLK[:, :, group.start - base : group.stop - base] = part_BTLK
                taken += size
            start = end
        return ids_BTLK.reshape(-1, *ids_BTLK.shape[2:])

    def _checked(self, blocks: range, groups: slice) -> memoryview:
        """Return the bytes of these groups of these blocks, after a check of the checksums of their chunks."""
        chunks, number = self._chunks, len(self._chunks.groups)
        sums = np.frombuffer(self.header.chunk_sums or b"", "<u8").tolist()
        spans = [
            [(block * number + group, *span) for group, span in enumerate(chunks.spans(block))] for block in blocks
        ]
        runs = [run[groups] for run in spans]
        if all(len(run) == number for run in runs):
            runs = [[span for run in runs for span in run]]  # one read: whole blocks lie next to each other
        found = []
        for run in filter(None, runs):
            base, end, offset = run[0][1], run[-1][2], self.header.payload_offset
            data = self._bytes(offset + base, offset + end)
            for chunk, start, stop in run:
                computed = xxhash.xxh3_64_intdigest(data[start - base : stop - base])
                if computed != sums[chunk]:
                    raise WireError(
                        f"checksum of chunk {chunk}: the blob was damaged or changed: expected {sums[chunk]:#018x}, "
                        f"got {computed:#018x}; send it again"
                    )
            found.append(data)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def _bytes(self, start: int, end: int) -> memoryview:
        data = envelope.as_bytes(self._source(start, end))
        if len(data) != end - start:
            raise WireError(f"truncated: expected bytes {start} to {end} of the blob, got {len(data)} bytes")
        self.bytes_read += len(data)
        return data if is_immutable(data) else memoryview(bytes(data))


def _count(captured: Runs) -> int:
    return sum(end - start for start, end in captured.spans(True))


def _slices(blob: Any) -> Callable[[int, int], memoryview]:
    view = envelope.as_bytes(blob)
    return lambda start, end: view[start:end]
