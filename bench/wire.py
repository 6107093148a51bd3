"""Measure what routes cost on the wire: ours beside vLLM's, prime-rl's, SGLang's and JSON lists, on one core.

    python -m bench.wire

All paths go from the ids of a capture to the bytes or text that would be sent, and back to an array of ids. They take
turns within one run, so that a busy machine slows all of them equally, and the best turn counts. Ours also check every
row and a checksum of the whole; the others check nothing. If a goal of the project is missed, the exit status is 1 and
a line names the goal.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from router_replay import RouterSpec, Routes, kernel, wire

ROWS = 4096
TURNS = 15
DENSE_TURNS = 41
JSON_ROWS = 64  # JSON is measured on a slice and scaled
MODELS = {"8 of 128": (48, 128, 8), "8 of 256": (58, 256, 8), "8 of 384": (60, 384, 8), "22 of 512": (40, 512, 22)}
SIZE_GOAL, TIME_GOAL, COPY_GOAL, IMPORT_GOAL, SEEKABLE_GOAL = 1.02, 1.0, 1.1, 300, 1.01
DENSE, UNCHECKED = "dense", "dense, check_rows=False"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Hold the results of one path on one model. Rates are in MB of raw ids per second."""

    model: str
    path: str
    bytes_per_token: float
    to_bound: float
    encode_rate: float
    decode_rate: float
    to_vllm: float  # encode + decode, relative to vLLM's time
    to_copy: float | None  # dense decode relative to a memory copy of the same bytes


def capture(layers: int, experts: int, k: int) -> Routes:
    """Return random sets in random slot order, which cannot be compressed below the bound."""
    spec = RouterSpec(experts, k, tuple(range(layers)))
    scores = np.random.default_rng(0).random((ROWS // 16, layers, experts), dtype=np.float32)
    part = np.argsort(scores, axis=-1)[..., :k].astype(spec.dtype)
    return Routes(np.concatenate([np.roll(part, turn, axis=1) for turn in range(16)]), spec)


# -- how peers do it, in as few steps as they need ---------------------------------------------------


def vllm_encode(ids: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode("ascii")


def vllm_decode(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def prime_rl_encode(ids: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(ids.tobytes()).decode("ascii")
    return {"data": data, "shape": list(ids.shape), "start": 0, "dtype": str(ids.dtype)}


def prime_rl_decode(value: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])


def sglang_encode(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype(np.int32).tobytes()).decode("ascii")


def json_encode(ids: np.ndarray) -> str:
    return json.dumps(ids.tolist())


def paths_of(routes: Routes) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return name -> (encode, decode)."""
    ids, shape = routes.ids, routes.ids.shape
    few, dtype = ids[:JSON_ROWS], routes.spec.dtype
    return {
        "sets": (lambda: wire.encode(routes), wire.decode),
        "sets, 2 threads": (lambda: wire.encode(routes, threads=2), lambda blob: wire.decode(blob, threads=2)),
        DENSE: (lambda: wire.encode(routes, "dense"), wire.decode),
        UNCHECKED: (lambda: wire.encode(routes, "dense"), lambda blob: wire.decode(blob, check_rows=False)),
        "vLLM (npy, base64)": (lambda: vllm_encode(ids), vllm_decode),
        "prime-rl (base64)": (lambda: prime_rl_encode(ids), prime_rl_decode),
        "SGLang (int32, base64)": (
            lambda: sglang_encode(ids),
            lambda text: np.frombuffer(base64.b64decode(text), np.int32).reshape(shape).astype(dtype),
        ),
        "JSON lists": (lambda: json_encode(few), lambda text: np.array(json.loads(text), dtype)),
    }


# -- measuring ---------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def wire_bytes(path: str, sent: Any) -> float:
    size = len(json.dumps(sent)) if isinstance(sent, dict) else len(sent)
    return size * (ROWS / JSON_ROWS if path == "JSON lists" else 1)


def measure_model(model: str) -> list[Row]:
    layers, experts, k = MODELS[model]
    routes = capture(layers, experts, k)
    paths = paths_of(routes)
    sent = {path: encode() for path, (encode, _) in paths.items()}
    for path, (_, decode) in paths.items():
        back = decode(sent[path])
        ids = back.ids if isinstance(back, Routes) else back
        assert np.array_equal(kernel.sort_sets(ids), kernel.sort_sets(routes.ids[: len(ids)])), path
    encode_times: dict[str, list[float]] = {path: [] for path in paths}
    decode_times: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(TURNS):
        for path, (encode, decode) in paths.items():
            pin(2 if "threads" in path else 1)
            scale = ROWS / JSON_ROWS if path == "JSON lists" else 1
            encode_times[path].append(seconds_of(encode) * scale)
            decode_times[path].append(seconds_of(functools.partial(decode, sent[path])) * scale)
    pin(1)
    to_copy = dense_to_copy(sent[DENSE])
    bound = layers * math.log2(math.comb(experts, k)) / 8
    took = {path: (min(encode_times[path]), min(decode_times[path])) for path in paths}
    megabytes = routes.nbytes / 1e6
    return [
        Row(
            model=f"{model}, {layers} layers",
            path=path,
            bytes_per_token=wire_bytes(path, sent[path]) / ROWS,
            to_bound=wire_bytes(path, sent[path]) / ROWS / bound,
            encode_rate=megabytes / took[path][0],
            decode_rate=megabytes / took[path][1],
            to_vllm=sum(took[path]) / sum(took["vLLM (npy, base64)"]),
            to_copy=to_copy.get(path),
        )
        for path in paths
    ]


def dense_to_copy(blob: bytes) -> dict[str, float]:
    """Return the time of a dense decode relative to copying the same bytes into allocated memory."""
    blob = wire.encode(Routes.concat([wire.decode(blob)] * max(1, round(24e6 / len(blob)))), "dense")
    source = np.frombuffer(blob, np.uint8)
    target = np.empty_like(source)
    times: dict[str, list[float]] = {"copy": [], DENSE: [], UNCHECKED: []}
    for _ in range(DENSE_TURNS):
        times["copy"].append(seconds_of(lambda: np.copyto(target, source)))
        times[DENSE].append(seconds_of(lambda: wire.decode(blob)))
        times[UNCHECKED].append(seconds_of(lambda: wire.decode(blob, check_rows=False)))
    return {path: min(times[path]) / min(times["copy"]) for path in (DENSE, UNCHECKED)}


def seekable(model: str) -> dict[str, float]:
    """Compare the seekable form with version 1: its size, both ways whole, and a 16th of the rows and layers."""
    layers, experts, k = MODELS[model]
    routes = capture(layers, experts, k)
    plain, blob = wire.encode(routes), wire.encode(routes, seekable=True)

    def part(reader: wire.Reader) -> object:
        return reader.read(first=ROWS // 2, last=ROWS // 2 + ROWS // 4, layers=range(layers // 4))

    works: dict[str, Callable[[], object]] = {
        "encode": lambda: wire.encode(routes),
        "decode": lambda: wire.decode(plain),
        "seekable encode": lambda: wire.encode(routes, seekable=True),
        "seekable decode": lambda: wire.decode(blob),
        "part": lambda: part(wire.Reader(blob)),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            times[name].append(seconds_of(work))
    best = {name: min(taken) for name, taken in times.items()}
    reader = wire.Reader(blob)
    part(reader)
    return {
        "size": len(blob) / len(plain),
        "encode": best["seekable encode"] / best["encode"],
        "decode": best["seekable decode"] / best["decode"],
        "part": best["part"] / best["decode"],
        "part bytes": reader.bytes_read / len(plain),
    }


def import_ms() -> dict[str, float]:
    """Measure importing the package, and everything the wire needs, in a fresh process."""
    code = "import time; begin = time.perf_counter(); import {}; print((time.perf_counter() - begin) * 1e3)"
    names = ("router_replay", "router_replay.wire")
    run = {name: [sys.executable, "-c", code.format(name)] for name in names}
    return {name: min(float(subprocess.check_output(run[name])) for _ in range(5)) for name in names}


def first_call_ms() -> float:
    """Measure encoding four rows as the first call of a fresh process after its imports."""
    code = (
        "import time, numpy as np; from router_replay import wire, Routes, RouterSpec;"
        "routes = Routes(np.tile(np.arange(22, dtype=np.uint16), (4, 40, 1)), RouterSpec(512, 22, tuple(range(40))));"
        "begin = time.perf_counter(); wire.encode(routes); print((time.perf_counter() - begin) * 1e3)"
    )
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))


def pin(cores: int) -> None:
    """Run on this many cores, if the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(ALLOWED)[-cores:])


ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}


def measure() -> list[Row]:
    return [row for model in MODELS for row in measure_model(model)]


# -- showing -----------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    titles = (
        "model",
        "path",
        "bytes/token",
        "to bound",
        "encode MB/s",
        "decode MB/s",
        "time to vLLM's",
        "decode to copy",
    )
    cells = [
        (
            row.model,
            row.path,
            f"{row.bytes_per_token:.1f}",
            f"{row.to_bound:.3f}",
            f"{row.encode_rate:.0f}",
            f"{row.decode_rate:.0f}",
            f"{row.to_vllm:.2f}",
            "" if row.to_copy is None else f"{row.to_copy:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [titles, *cells]) for column in range(len(titles))]
    sides = ["<" if column < 2 else ">" for column in range(len(titles))]

    def show(line: tuple[str, ...]) -> str:
        parts = (f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
        return "| " + " | ".join(parts) + " |"

    rule = [
        ("-" * width if side == "<" else "-" * (width - 1) + ":") for side, width in zip(sides, widths, strict=True)
    ]
    return "\n".join([show(titles), "| " + " | ".join(rule) + " |", *map(show, cells)])


def missed(rows: list[Row]) -> list[str]:
    """Return the goals that these numbers miss."""
    failures: list[str] = []
    for row in rows:
        layers, experts, k = MODELS[row.model.partition(",")[0]]
        if row.path == "sets":
            bound = layers * math.log2(math.comb(experts, k)) / 8
            header = (64 + 8 + 4 * layers + 15 + 8) / ROWS
            if row.bytes_per_token > SIZE_GOAL * bound + header:
                failures.append(f"{row.model}: sets takes {row.to_bound:.3f} of the bound, goal {SIZE_GOAL} + header")
            if row.to_vllm > TIME_GOAL:
                failures.append(f"{row.model}: sets both ways takes {row.to_vllm:.2f} of vLLM's time, goal {TIME_GOAL}")
        if row.path == UNCHECKED and row.to_copy is not None and row.to_copy > COPY_GOAL:
            failures.append(f"{row.model}: dense decode takes {row.to_copy:.2f} of a memory copy, goal {COPY_GOAL}")
    return failures


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    built = "compiled" if kernel.COMPILED else "NumPy"
    turns = f"best of {TURNS} turns ({DENSE_TURNS} for dense)"
    print(f"\n{ROWS} rows per model, {built} kernel, {turns}, one core unless said otherwise\n")
    rows = measure()
    print(table(rows))
    print(f"\nfirst encode in a fresh process, 22 of 512: {first_call_ms():.1f} ms")
    failures = missed(rows)
    for model in MODELS:
        found = seekable(model)
        print(
            f"seekable, {model}, to version 1: size {found['size']:.4f}, encode {found['encode']:.2f}, decode "
            f"{found['decode']:.2f}; a 16th of rows and layers: {found['part']:.3f} of the time, "
            f"{found['part bytes']:.3f} of the bytes"
        )
        if found["size"] > SEEKABLE_GOAL:
            failures.append(f"{model}: the seekable form takes {found['size']:.4f} of version 1, goal {SEEKABLE_GOAL}")
    imports = import_ms()
    print(", ".join(f"import {name}: {taken:.0f} ms" for name, taken in imports.items()))
    if imports["router_replay"] > IMPORT_GOAL:
        failures.append(f"import router_replay takes {imports['router_replay']:.0f} ms, goal {IMPORT_GOAL}")
    for line in failures:
        print(f"MISSED: {line}")
    print("some goals were missed" if failures else "all goals reached")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
