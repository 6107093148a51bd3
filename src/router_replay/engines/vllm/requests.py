"""Converts requests to vLLM's format. The client writes it and the plugin reads it; neither needs torch for that."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from router_replay import wire
from router_replay.engines import checks
from router_replay.engines.types import Request
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

# The key in SamplingParams.extra_args for the rows of a request: the bytes of wire.encode, or their base64.
EXTRA_ARGUMENT = "router_replay"


class CheckedRows(bytes):
    """Encoded rows of a Routes of this process, sorted. They need no second check, unlike what comes from outside."""


def sampling_arguments(request: Request, end_of_sequence: Sequence[int], as_text: bool) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams, as keyword arguments or, with `as_text`, ready for JSON."""
    sampling = request.sampling
    stops = list(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        # Without a tokenizer, vLLM does not know the end-of-sequence tokens.
        stops += [token for token in end_of_sequence if token not in stops]
    arguments: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop_token_ids": stops,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "detokenize": False,
        # Some versions kill the engine if this reaches the prompt's length; Request.check keeps it below.
        "routed_experts_prompt_start": request.start,
    }
    if request.forced_routes is not None:
        arguments["extra_args"] = extra_arguments(request.forced_routes, as_text)
    return arguments


# /v1/completions fills fields that a request leaves out from the model's generation_config.json, so all of them are
# sent, with values that change nothing.
NEUTRAL: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}


def completions_arguments(request: Request, end_of_sequence: Sequence[int], cuts_rows: bool) -> dict[str, Any]:
    """Return the sampling fields of a body for vLLM's /v1/completions: token ids in, token ids and rows out.

    `cuts_rows` says whether the server knows `routed_experts_prompt_start` on this route, as vLLM does from 0.28 on.
    """
    arguments = {**NEUTRAL, **sampling_arguments(request, end_of_sequence, as_text=True)}
    del arguments["detokenize"]  # not a field of this route
    if not cuts_rows:
        del arguments["routed_experts_prompt_start"]
    if "extra_args" in arguments:
        arguments["vllm_xargs"] = arguments.pop("extra_args")
    # Tokens are written as numbers, so that a server without a tokenizer answers too.
    return arguments | {"return_token_ids": True, "return_tokens_as_token_ids": True}


def end_of_sequence_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids in `eos_token_id` of a config or generation config: a number, a list, or nothing."""
    found = config.get("eos_token_id")
    if found is None:
        return ()
    return checks.tokens(found if isinstance(found, list | tuple) else [found], "eos_token_id of the model's config")


def extra_arguments(routes: Routes, as_text: bool = True) -> dict[str, str | bytes]:
    """Return the SamplingParams.extra_args for these routes: text for JSON, bytes for an engine in this process.

    As text, rows are sent as sets, which halves the size; slot order is kept if it has a meaning.
    """
    if not as_text:
        return {EXTRA_ARGUMENT: CheckedRows(wire.encode(routes.sorted(), codec="dense"))}
    blob = wire.encode(routes, codec="dense" if routes.spec.ordered else "sets")
    return {EXTRA_ARGUMENT: base64.b64encode(blob).decode("ascii")}


def rows_given(sampling_params: Any) -> Any:
    """Return the encoded rows of a request, as text or bytes; None if it has none."""
    return ((sampling_params.extra_args if sampling_params is not None else None) or {}).get(EXTRA_ARGUMENT)


def routes_of(given: str | bytes, spec: RouterSpec, check_rows: bool = True) -> Routes:
    """Decode the rows of a request and check them against the model."""
    blob = base64.b64decode(given, validate=True) if isinstance(given, str) else given
    return wire.decode(blob, spec=spec, check_rows=check_rows)
