"""Parses SGLang's answers strictly: `/generate`, and the OpenAI routes with `sglext`.

`meta_info.weight_versions` says which weights sampled each token, as spans over the sampled tokens:

    [{"version": "3", "start": 0, "end": 41}, {"version": "4", "start": 41, "end": 60}]

A request that was held in place while weights changed keeps its KV and its rows, so both spans are valid. A request
that was retracted (`num_retractions`) recomputed its old tokens: their rows come from the NEW weights, but their
log-probs from the old ones. Such an answer is refused, because no later step could detect that it is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from router_replay import wire
from router_replay.engines.http import TokenId, decoded
from router_replay.engines.types import Completion, Request
from router_replay.errors import EngineError, RouterReplayError
from router_replay.routes import Routes, row_count
from router_replay.spec import RouterSpec


class Span(msgspec.Struct):
    """Holds one entry of `weight_versions`: the sampled tokens [start, end) and the name of their weights."""

    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    prompt_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None
    num_retractions: int | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[TokenId] = []


def completion_of(
    body: bytes,
    request: Request,
    index: int,
    spec: RouterSpec,
    version: int,
    names: Mapping[str, int],
    routes: bool,
    vocabulary: int | None = None,
) -> Completion:
    """Return one sample from a `/generate` answer. Raises EngineError if the answer is invalid.

    `version` is the policy version when the request started; `names` maps the server's version names to policy
    versions. `routes` says whether rows were requested; if not, they are marked as missing.
    """
    answer = decoded(body, _Answer, f"{request.id}: the answer to /generate")
    meta, tokens, prompt = answer.meta_info, len(answer.output_ids), len(request.token_ids)
    if meta.prompt_tokens not in (None, prompt):
        raise EngineError(
            f"{request.id}: sent {prompt} prompt tokens, but SGLang used {meta.prompt_tokens}: it cut the prompt, and "
            "rows would belong to other positions. Start it without --allow-auto-truncate, or send a shorter prompt"
        )
    versions = _token_versions(meta, tokens, version, names, request.id)
    finish = meta.finish_reason.type if meta.finish_reason else None
    found = None
    if tokens and meta.routed_experts is not None:
        # CaptureWatch counts zero layers over all answers.
        found = _rows(meta.routed_experts, spec, request.id, allow_zero_layers=True)
    elif tokens and routes and finish != "abort":  # a request aborted in the queue has tokens but no rows
        raise EngineError(
            f"{request.id}: SGLang returned {tokens} tokens without meta_info.routed_experts: start the server with "
            "--enable-return-routed-experts"
        )
    return Completion.assemble(
        request,
        index,
        spec=spec,
        token_ids=answer.output_ids,
        logprobs=_logprobs(meta, answer.output_ids, request.id),
        routes=found,
        versions=versions,
        finish_reason=finish,
        vocabulary=vocabulary,
    )


def routes_of_openai(
    body: bytes | Mapping[str, Any], spec: RouterSpec, *, start: int = 0, allow_zero_layers: bool = False
) -> Routes:
    """Return the rows of a `/v1/completions` or `/v1/chat/completions` answer requested with `return_routed_experts`.

    `start` is the `routed_experts_start_len` that was sent. SGLang returns one array for all choices, that of the
    first choice, so an answer with more than one choice is refused with EngineError. `allow_zero_layers` is passed to
    Routes.from_engine.
    """
    try:
        answer = msgspec.json.decode(body) if isinstance(body, bytes) else body
        choices, extension, usage = answer["choices"], answer.get("sglext"), answer.get("usage") or {}
        count = len(choices)
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"expected an OpenAI response of SGLang, and could not read it: {type(error).__name__}: {error}"
        ) from error
    if count != 1:
        raise EngineError(
            f"the answer has {count} choices, expected 1: sglext.routed_experts has the rows of the first choice only. "
            "Send n = 1 in each request, or use /generate (SglangEngine), where each sample has its own rows"
        )
    text = extension.get("routed_experts") if isinstance(extension, Mapping) else None
    if text is None:
        raise EngineError(
            "the answer has no sglext.routed_experts: start the server with --enable-return-routed-experts, and send "
            "return_routed_experts: true in the request"
        )
    spans = (answer.get("metadata") or {}).get("weight_versions") or []
    if len(spans) > 1:
        raise EngineError(
            f"the weights changed during this answer ({[span.get('version') for span in spans]}), and the OpenAI "
            "routes do not say whether SGLang recomputed the old tokens: use /generate (SglangEngine)"
        )
    rows = _rows(text, spec, "sglext", allow_zero_layers)
    sizes = [size for size in (usage.get("prompt_tokens"), usage.get("completion_tokens")) if isinstance(size, int)]
    expected = row_count(sizes[0], sizes[1], start) if len(sizes) == 2 else len(rows)
    if len(rows) != expected:
        raise EngineError(
            f"expected {expected} rows (prompt_tokens {sizes[0]} + completion_tokens {sizes[1]} - 1 - start {start}), "
            f"got {len(rows)}"
        )
    return rows


def _rows(text: str, spec: RouterSpec, place: str, allow_zero_layers: bool) -> Routes:
    try:
        return wire.from_sglang(text, spec, allow_zero_layers=allow_zero_layers)
    except RouterReplayError as error:
        raise EngineError(f"{place}: {error}") from error


def _logprobs(meta: _Meta, token_ids: Sequence[int], place: str) -> np.ndarray:
    pairs = meta.output_token_logprobs or []
    if [token for _, token, _ in pairs] != list(token_ids):
        raise EngineError(
            f"{place}: expected the log-probs of {len(token_ids)} sampled tokens, got the log-probs of {len(pairs)} "
            "tokens, or of other tokens: the answer was discarded"
        )
    values = np.asarray([np.nan if value is None else value for value, _, _ in pairs], np.float32)
    if np.isnan(values).any():
        raise EngineError(
            f"{place}: sampled token {int(np.flatnonzero(np.isnan(values))[0])} has no log-prob: "
            "the answer was discarded"
        )
    return values


def _token_versions(meta: _Meta, tokens: int, version: int, names: Mapping[str, int], place: str) -> np.ndarray:
    if not tokens:
        return np.zeros(0, np.int64)
    spans = meta.weight_versions
    if spans is None:
        spans = [] if meta.weight_version is None else [Span(meta.weight_version, 0, tokens)]
    if not spans:
        raise EngineError(
            f"{place}: the answer does not say which weights sampled it: expected meta_info.weight_versions or "
            "weight_version"
        )
    gaps = any(a.end != b.start for a, b in itertools.pairwise(spans))
    if gaps or spans[0].start != 0 or spans[-1].end != tokens or any(span.end < span.start for span in spans):
        raise EngineError(
            f"{place}: weight_versions {_shown(spans)} do not cover the {tokens} sampled tokens: expected spans from 0 "
            f"to {tokens} without gaps"
        )
    unknown = [span.version for span in spans if span.version not in names]
    if unknown:
        raise EngineError(
            f"{place}: sampled with weights {unknown}, which this engine did not load (it loaded {sorted(names)}): "
            "another client updates this server. Load weights through update_weights of one engine only"
        )
    found = [names[span.version] for span in spans]
    if len(set(found)) > 1 and meta.num_retractions != 0:
        raise EngineError(
            f"{place}: the weights changed ({_shown(spans)}) and num_retractions is {meta.num_retractions}, expected "
            "0: SGLang recomputed the old tokens of a retracted request, so their rows come from the new weights and "
            "their log-probs from the old ones. Generate it again; pause through this engine only, and give the server "
            "enough memory not to retract requests"
        )
    if found[0] != version:
        raise EngineError(
            f"{place}: started with policy version {version}, but its first token was sampled by version {found[0]}: "
            "it is unknown which of them routed the prompt. Generate it again"
        )
    return np.repeat(found, [span.end - span.start for span in spans]).astype(np.int64)


def _shown(spans: Sequence[Span]) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]
