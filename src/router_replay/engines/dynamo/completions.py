"""Writes requests for Dynamo's `/v1/completions`, one per sample, and reads the answers."""

from __future__ import annotations

from typing import Any

import msgspec

from router_replay import wire
from router_replay.engines.http import TokenId, decoded
from router_replay.engines.types import Request
from router_replay.engines.vllm.samples import Sample
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

COMPLETIONS = "/v1/completions"
# A field that a request leaves out is taken from the model's generation_config.json, so all of them are sent.
NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}


def completions_body(request: Request, index: int, model: str, salt: str, prompt_start: bool) -> dict[str, Any]:
    """Return the JSON body for sample `index`. `prompt_start` says whether this Dynamo takes the start of the rows."""
    sampling = request.sampling
    nvext: dict[str, Any] = {"extra_fields": ["completion_token_ids", "routed_experts"]}
    if salt:
        nvext["cache_salt"] = salt
    if prompt_start:
        nvext["routed_experts_prompt_start"] = request.start
    body: dict[str, Any] = {
        **NEUTRAL,
        "model": model,
        "prompt": [int(token) for token in request.token_ids],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 1,
        "ignore_eos": sampling.ignore_eos,
        "stream": False,
        "nvext": nvext,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed + index
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    return body


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Nvext(msgspec.Struct):
    completion_token_ids: list[TokenId] | None = None
    routed_experts: dict[str, Any] | str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    nvext: _Nvext | None = None
    usage: _Usage | None = None


def sample_of(body: bytes, request: Request, index: int, spec: RouterSpec) -> Sample:
    """Read the answer for sample `index`. Raises EngineError if it is invalid, or glued together from two workers."""
    answer = decoded(body, _Answer, f"{request.id}: Dynamo's answer")
    if len(answer.choices) != 1:
        raise EngineError(
            f"{request.id}: expected one choice, since nvext has the rows of one, got {len(answer.choices)}"
        )
    [choice], nvext, prompt = answer.choices, answer.nvext or _Nvext(), len(request.token_ids)
    if choice.index != 0:
        raise EngineError(f"{request.id}: expected index 0 of the only choice, got {choice.index}")
    if answer.usage is None:
        raise EngineError(
            f"{request.id}: the answer has no usage, which shows whether one worker computed all of it: this is not "
            "Dynamo, or a proxy removed the field"
        )
    if answer.usage.prompt_tokens != prompt:
        raise EngineError(
            f"{request.id}: expected a prompt of {prompt} tokens, Dynamo computed one of {answer.usage.prompt_tokens}: "
            "a worker died, and another one continued (migration) and computed the rows of earlier tokens again. Send "
            "the request again. With --migration-limit 0 the frontend itself reports the error"
        )
    if not answer.usage.completion_tokens:  # aborted before the first token
        return Sample(index, [], [], None, choice.finish_reason)
    if nvext.completion_token_ids is None:
        raise EngineError(
            f"{request.id}: the answer has no nvext.completion_token_ids: this Dynamo is too old to return token ids, "
            "install a newer one"
        )
    tokens = nvext.completion_token_ids
    logprobs = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
    if len(logprobs) != len(tokens) or None in logprobs:
        raise EngineError(
            f"{request.id}: expected a log-prob for each of {len(tokens)} tokens, got {str(logprobs)[:200]}"
        )
    rows = None if nvext.routed_experts is None else _rows(nvext.routed_experts, request, spec)
    return Sample(index, tokens, [float(value or 0) for value in logprobs], rows, choice.finish_reason)


def _rows(value: dict[str, Any] | str, request: Request, spec: RouterSpec) -> Routes:
    """Return the rows from the request's start on; those before it are cut off here if the server sent them.

    With SGLang workers, Dynamo forwards SGLang's own text, which has all rows.
    """
    # CaptureWatch counts zero layers over all answers.
    if isinstance(value, str):
        rows, start = wire.from_sglang(value, spec, allow_zero_layers=True), 0
    else:
        rows = wire.from_dynamo(value, spec, prompt_length=len(request.token_ids), allow_zero_layers=True)
        start = wire.peer_start(value)
    if start > request.start:
        raise EngineError(f"{request.id}: expected rows from position {request.start} on, got rows from {start} on")
    return rows[request.start - start :]
