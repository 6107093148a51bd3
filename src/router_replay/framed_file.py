"""The framing of every append-only file here: a line that names the file, then records with a length and a checksum.

    b"router-replay journal 1\\n", then for each record: length (uint32), CRC-32 of the payload (uint32), payload

Numbers are little-endian. A record that reaches beyond the end of the file was cut off by a kill and is not read. A
wrong checksum is an error. The journal of unfinished runs and the files of trajectories are such files.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

HEAD = struct.Struct("<II")


def framed(payload: bytes) -> bytes:
    """Return one record: the head of `payload`, and `payload`."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def read_frames(
    file: BinaryIO, magic: bytes, refuse: Callable[[int, str], Exception], start: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the payload of each whole record of `file`, with the position after it.

    The file must begin with the line `magic`. `refuse` makes the error that is raised, from the number of the record
    (counted from 0 where reading began) and the reason. `start` is the position of the first record to read, one that
    an earlier call returned; by default it is the first of the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(magic)) != magic:
        raise refuse(0, f"the file does not begin with the line {magic.decode().strip()!r}")
    at = len(magic) if start is None else start
    file.seek(at)
    number = 0
    while size - at >= HEAD.size:
        length, checksum = HEAD.unpack(file.read(HEAD.size))
        at += HEAD.size + length
        if at > size:  # the process was killed while it wrote this record
            return
        payload = file.read(length)
        if zlib.crc32(payload) != checksum:
            raise refuse(number, "its checksum is wrong")
        yield at, payload
        number += 1
