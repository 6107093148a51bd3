"""A mutation fuzzer of every reader: damaged input must raise WireError, or decode to rows that are sound.

    python tests/wire/fuzz.py --inputs 1000000
    python tests/wire/fuzz.py --seconds 20 --seed 7

It knows the structure: most mutated blobs get a right checksum again, and mutated base64 stays
base64, so that the code behind the first check is reached. A failure prints the seed and number of
its input, and leaves the input in `fuzz-failure.bin`.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from router_replay import RouterSpec, Routes, wire
from router_replay.errors import WireError

SPECS = (
    RouterSpec(8, 2, (1, 3), num_layers=4),
    RouterSpec(128, 8, (0, 1, 2)),
    RouterSpec(512, 22, (0, 1)),
    RouterSpec(512, 40, (2,)),
    RouterSpec(5, 5, (0, 0, 7)),
    RouterSpec(300, 1, (0,), num_layers=1),
)
INTERESTING = (0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 10**12, 2**40, 2**63 - 1, 2**64 - 1)
HEADER_FIELDS = ((8, 2), (10, 1), (11, 1), (12, 4), (16, 4), (20, 4), (24, 4), (28, 4), (32, 8), (40, 8), (48, 8))
HEADER_FIELDS += ((56, 4), (60, 4), (64, 8), (72, 8), (80, 8), (88, 8), (96, 8))
TOKENS = list(range(100, 140))

Reader = Callable[[Any], Routes]


def routes_of(spec: RouterSpec, rows: int, seed: int) -> Routes:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((rows, len(spec.layers), spec.num_experts)), axis=-1)[..., : spec.top_k]
    captured = rng.random(rows) < 0.7 if seed % 2 else None
    return Routes(ids, spec, captured=captured, versions=rng.integers(0, 3, rows) if seed % 3 else None)


def seeds() -> list[tuple[str, Any, Reader]]:
    """(kind, valid input, reader) of our own codecs and of every peer's format."""
    found: list[tuple[str, Any, Reader]] = []
    for number, spec in enumerate(SPECS):
        for rows in (0, 1, 9):
            routes = routes_of(spec, rows, seed=number + rows)
            for codec in ("sets", "dense"):
                tokens = TOKENS if rows else None
                for seekable in (False, True):
                    blob = wire.encode(routes, codec, token_ids=tokens, start=rows, seekable=seekable)
                    found.append(("blob", blob, wire.decode))
    for spec in (SPECS[0], SPECS[1]):
        routes = Routes(routes_of(spec, 6, seed=0).ids, spec)
        for peer in ("vllm", "sglang", "nemo", "prime_rl", "dynamo", "skyrl", "megatron"):
            write, read = getattr(wire, f"to_{peer}"), getattr(wire, f"from_{peer}")
            value = write(routes)
            kind = "object" if isinstance(value, dict) else "text"
            found.append((kind, value, lambda value, read=read, spec=spec: read(value, spec)))
    return found


# -- mutations --------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(7):
            case 0 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                del changed[at : at + rng.choice((1, 2, 8, 16, 1000))]
            case 3:
                changed[at:at] = rng.randbytes(rng.choice((1, 2, 8, 16)))
            case 4:
                value = rng.choice(INTERESTING) + rng.choice((-1, 0, 0, 1))
                size = rng.choice((1, 2, 4, 8))
                changed[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
            case 5:
                length = rng.randrange(1, 33)
                source = rng.randrange(len(changed)) if changed else 0
                changed[at : at + length] = changed[source : source + length]
            case 6:
                del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


def mutate_blob(blob: bytes, rng: random.Random) -> bytes:
    changed = bytearray(blob)
    if rng.random() < 0.6:
        for _ in range(rng.choice((1, 1, 2, 3))):
            offset, size = rng.choice(HEADER_FIELDS)
            old = int.from_bytes(changed[offset : offset + size], "little")
            value = rng.choice((old + 1, old - 1, old * 2, old ^ 1 << rng.randrange(8 * size), rng.choice(INTERESTING)))
            changed[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        if rng.random() < 0.3:  # make the lengths agree again, so that what stands behind is reached
            (header_length,) = struct.unpack_from("<I", changed, 12)
            struct.pack_into("<Q", changed, 48, max(len(changed) - header_length - 8, 0))
        if rng.random() < 0.2:  # and the one captured run with the rows
            changed[64:72] = changed[32:40]
    else:
        changed = bytearray(mutate_bytes(blob, rng))
    if blob[8] == 2 and rng.random() < 0.9:
        end = int.from_bytes(changed[12:16], "little")
        if 80 <= end <= len(changed):
            changed[end - 8 : end] = xxhash.xxh3_64_intdigest(changed[: end - 8]).to_bytes(8, "little")
    elif rng.random() < 0.9 and len(changed) >= 8:
        changed[-8:] = xxhash.xxh3_64_intdigest(changed[:-8]).to_bytes(8, "little")
    return bytes(changed)


def mutate_text(text: str | bytes, rng: random.Random) -> str | bytes:
    raw = text.encode() if isinstance(text, str) else text
    prefix, colon, body = raw.rpartition(b":")
    if rng.random() < 0.6:  # mutate what the base64 stands for
        try:
            body = base64.b64encode(mutate_bytes(base64.b64decode(body), rng))
        except ValueError:
            body = mutate_bytes(body, rng)
        if colon and rng.random() < 0.3:
            prefix = mutate_bytes(prefix, rng)
        raw = prefix + colon + body
    else:
        raw = mutate_bytes(raw, rng)
    return raw if rng.random() < 0.3 else raw.decode("latin-1")


def mutate_object(value: Any, rng: random.Random) -> Any:
    """One leaf of a JSON object changed, or its text."""
    if rng.random() < 0.1:
        return mutate_text(json.dumps(value), rng)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.05:
            del changed[key]
        else:
            changed[key] = mutate_object(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_object(value[at], rng), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.8:
        return mutate_text(value, rng)
    if isinstance(value, int) and rng.random() < 0.8:
        return rng.choice((value + 1, value - 1, -value, rng.choice(INTERESTING), 10**30))
    return rng.choice((None, True, 1.5, "", [], {}, [1, 2, 3], "uint8", -1, float("nan"), b"\xff", "\ud800"))


MUTATE = {"blob": mutate_blob, "text": mutate_text, "object": mutate_object}


# -- the loop ---------------------------------------------------------------------------------------


def check_sound(routes: Routes) -> None:
    """What a reader lets through must be what Routes would accept from anyone."""
    Routes(routes.ids, routes.spec, captured=routes.captured)
    assert routes.ids.shape == (len(routes), *routes.spec.row_shape)
    assert routes.ids.dtype == routes.spec.dtype
    assert len(routes.captured_runs) == len(routes)


def run(inputs: int | None = None, seconds: float | None = None, seed: int = 0) -> Counter[str]:
    """Feed mutated inputs until enough were tried. Any exception but WireError is raised, with its input."""
    corpus = seeds()
    for _, value, read in corpus:
        check_sound(read(value))  # the seeds themselves must be fine
    counts: Counter[str] = Counter()
    end = None if seconds is None else time.monotonic() + seconds
    number = 0
    while (inputs is None or number < inputs) and (end is None or number % 256 or time.monotonic() < end):
        rng = random.Random(seed << 40 | number)
        kind, value, read = corpus[rng.randrange(len(corpus))]
        mutated = MUTATE[kind](value, rng)  # type: ignore[operator]
        number += 1
        try:
            check_sound(read(mutated))
            counts["decoded"] += 1
        except WireError:
            counts["refused"] += 1
        except BaseException:
            Path("fuzz-failure.bin").write_bytes(mutated if isinstance(mutated, bytes) else repr(mutated).encode())
            print(f"input {number - 1} of seed {seed}, {kind}: {mutated!r:.2000}", file=sys.stderr)  # noqa: T201
            raise
    counts["inputs"] = number
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, help="stop after this many inputs")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.inputs is None and options.seconds is None:
        parser.error("say --inputs or --seconds")
    begin = time.perf_counter()
    counts = run(options.inputs, options.seconds, options.seed)
    rate = counts["inputs"] / (time.perf_counter() - begin)
    print(  # noqa: T201
        f"{counts['inputs']} inputs, {rate:.0f} per second: {counts['refused']} refused with WireError, "
        f"{counts['decoded']} decoded to sound rows, nothing else"
    )


if __name__ == "__main__":
    main()
