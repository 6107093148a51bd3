"""Read the routes of a file in any form: ours, those of other projects, and dumps of trajectories as JSON lines.

    name, parts = open_any(pathlib.Path("out/routes"))
    for part in parts:
        part.place, part.routes, part.record

A form is known by a mark or by the names of its fields, never by a shape. What no mark tells must be named.
"""

from __future__ import annotations

import base64
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from router_replay import wire
from router_replay.batch import Sample
from router_replay.errors import RouterReplayError, WireError
from router_replay.recording.file import MAGIC, TrajectoryReader, TrajectoryRecord
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.wire.envelope import MAGIC as BLOB_MAGIC

PEERS: Mapping[str, Callable[..., Routes]] = {
    "vllm": wire.from_vllm,
    "sglang": wire.from_sglang,
    "prime-rl": wire.from_prime_rl,
    "dynamo": wire.from_dynamo,
    "skyrl": wire.from_skyrl,
    "nemo": wire.from_nemo,
    "megatron": wire.from_megatron,
}
FORMATS = ("blob", "trajectories", "jsonl", *PEERS, "megatron-trace")
_NPY, _NPY_IN_BASE64 = b"\x93NUMPY", b"k05VTVBZ"


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Hold the routes of one sequence of a file.

    `place` says where in the file. `routes` are None if the file has none for this sequence. `start` is the position
    of row 0 in its sequence. `record` is the trajectory, if the file has the tokens. `nbytes` is the size of the routes
    in the file, and `notes` are facts about their form.
    """

    place: str
    routes: Routes | None
    nbytes: int
    start: int = 0
    record: TrajectoryRecord | None = None
    notes: tuple[str, ...] = ()


def open_any(path: pathlib.Path, form: str | None = None, spec: RouterSpec | None = None) -> tuple[str, Iterator[Part]]:
    """Return the form of the file `path`, and its parts in order.

    `form` is one of FORMATS, for a file that does not tell; for JSON lines with tokens it is the form of their
    `routed_experts`. `spec` is that of the model, which most forms of other projects need. Raises WireError with the
    reason if the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(MAGIC):
        return "trajectories", _trajectories(path)
    data = path.read_bytes()
    if head.startswith(BLOB_MAGIC):
        return "blob", iter([_blob(data, "the file", spec)])
    if not data.strip():
        raise WireError(f"{path} is empty: expected a file of routes or trajectories")
    if _first_line(data).get("token_ids") is not None:
        return "jsonl", _json_lines(data, path, form, spec)
    found = form or _form_of(data)
    if found is None or found not in (*PEERS, "megatron-trace"):
        told = f"does not look like {form!r}" if form else "has no mark that tells its form"
        raise WireError(f"{path} {told}: give --format, one of {', '.join(FORMATS)}")
    if spec is None:
        raise WireError(f"{path} is of the form {found}, which does not say the model's experts: give --model")
    return found, _parts_of_peer(data, found, spec)


def _trajectories(path: pathlib.Path) -> Iterator[Part]:
    for number, record in enumerate(TrajectoryReader(path)):
        yield _of_record(record, f"trajectory {number} (step {record.step}, episode {record.episode})")


def _of_record(record: TrajectoryRecord, place: str) -> Part:
    return Part(place, record.routes, record.routes.nbytes if record.routes is not None else 0, record=record)


def _blob(data: bytes, place: str, spec: RouterSpec | None) -> Part:
    header, routes = wire.read_header(data), wire.decode(data, spec=spec)
    notes = (
        f"wire format {2 if header.seekable else 1}, codec {header.codec}",
        "token digest: " + ("yes" if header.has_token_digest else "no"),
    )
    return Part(place, routes, len(data), header.start, notes=notes)


# -- JSON lines with tokens -------------------------------------------------------------------------


class _Line(msgspec.Struct):
    token_ids: list[int]
    logprobs: list[float] | None = None
    loss_mask: list[int] | None = None
    versions: list[int] | None = None
    routes: str = ""
    routed_experts: Any = None
    reward: float = 0.0
    group: int = 0
    problem: int = 0
    temperature: float = 1.0


def _first_line(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data.lstrip().split(b"\n", 1)[0])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _json_lines(data: bytes, path: pathlib.Path, form: str | None, spec: RouterSpec | None) -> Iterator[Part]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            record = _record(msgspec.json.decode(line, type=_Line), number, form, spec)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"{path}, {place}: {error}") from error
        yield _of_record(record, place)


def _record(line: _Line, number: int, form: str | None, spec: RouterSpec | None) -> TrajectoryRecord:
    tokens = np.array(line.token_ids, np.int64)
    mask = np.array(line.loss_mask if line.loss_mask is not None else [1] * len(tokens)).astype(bool)
    sampled = line.logprobs is not None
    sample = Sample.of(
        Sample(
            tokens,
            np.array(line.logprobs if sampled else np.zeros(len(tokens)), np.float32),
            mask if sampled else np.zeros(len(tokens), bool),
            _rows_of(line, tokens, form, spec),
            versions=np.array(line.versions) if line.versions is not None else 0,
        )
    )
    return TrajectoryRecord(sample, 0, line.group, number - 1, line.problem, line.reward, temperature=line.temperature)


def _rows_of(line: _Line, tokens: np.ndarray, form: str | None, spec: RouterSpec | None) -> Routes | None:
    """Return one row per token; rows that the line does not have are uncaptured."""
    if line.routes:
        blob = base64.b64decode(line.routes, validate=True)
        start, routes = wire.read_header(blob).start, wire.decode(blob, spec=spec)
    elif line.routed_experts is not None:
        found = form or _form_of_value(line.routed_experts)
        if found is None or found not in PEERS:
            raise WireError(f"routed_experts has no mark that tells its form: give --format, one of {', '.join(PEERS)}")
        if spec is None:
            raise WireError(f"routed_experts of the form {found} does not say the model's experts: give --model")
        routes = PEERS[found](line.routed_experts, spec)
        start = wire.peer_start(line.routed_experts) if found in ("prime-rl", "dynamo") else 0
    else:
        return None
    left = len(tokens) - start - len(routes)
    if left < 0:
        raise WireError(f"{start + len(routes)} rows for {len(tokens)} tokens, expected at most one row per token")
    return Routes.concat([Routes.missing(start, routes.spec), routes, Routes.missing(left, routes.spec)])


# -- other projects ---------------------------------------------------------------------------------


def _form_of(data: bytes) -> str | None:
    text = data.strip()
    if text.startswith(b"nrlre1:"):
        return "nemo"
    if text.startswith((_NPY, _NPY_IN_BASE64)):
        return "vllm"
    if "top_indices" in _first_line(text):
        return "megatron-trace"
    try:
        return _form_of_value(msgspec.json.decode(text))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _form_of_value(value: Any) -> str | None:
    """Return the form that the names of the fields, or the mark of a text, tell."""
    if isinstance(value, str):
        return _form_of(value.encode()) if value[:1] not in ("{", "[") else None
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("choices"), list) and value["choices"] and isinstance(value["choices"][0], dict):
        return "megatron" if "moe_topk_indices" in value["choices"][0] else "vllm"
    for name, form in (("nvext", "dynamo"), ("meta_info", "sglang"), ("moe_topk_indices", "megatron")):
        if name in value:
            return form
    if {"data", "shape", "dtype"} <= set(value):
        return "prime-rl" if "start" in value else "skyrl"
    return None


def _parts_of_peer(data: bytes, form: str, spec: RouterSpec) -> Iterator[Part]:
    if form == "megatron-trace":
        for step, routes in wire.from_megatron_trace(data, spec).items():
            yield Part(f"step {step}", routes, routes.nbytes)
        return
    for place, value in _values(data, form):
        try:
            routes = PEERS[form](value, spec)
        except RouterReplayError as error:
            raise WireError(f"{place}: {error}") from error
        start = wire.peer_start(value) if form in ("prime-rl", "dynamo") else 0
        size = len(value) if isinstance(value, str | bytes) else len(msgspec.json.encode(value))
        yield Part(place, routes, size, start)


def _values(data: bytes, form: str) -> list[tuple[str, Any]]:
    """Return what the reader of this form takes, out of a file with the value itself or with a whole response."""
    text = data.strip()
    if text.startswith(_NPY):
        return [("the file", base64.b64encode(data))]
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return [("the file", text)]
    if isinstance(value, dict) and isinstance(value.get("choices"), list) and form != "dynamo":
        field = None if form == "megatron" else "routed_experts"
        return [
            (f"choice {number}", choice.get(field) if field and isinstance(choice, dict) else choice)
            for number, choice in enumerate(value["choices"])
        ]
    if isinstance(value, dict) and isinstance(value.get("meta_info"), dict):
        value = value["meta_info"].get("routed_experts")
    return [("the file", value)]
