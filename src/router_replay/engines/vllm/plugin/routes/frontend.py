"""Check requests where they enter vLLM, so that rows that no router could have produced never reach the engine.

An error inside the engine core ends the server; here it is an error of one request (HTTP 400). The prefix cache knows
only tokens, so KV entries made under forced rows get a salt of their own.
"""

from __future__ import annotations

from typing import Any

import xxhash

from router_replay import wire
from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.requests import EXTRA_ARGUMENT, CheckedRows, routes_of, rows_given
from router_replay.errors import RouterReplayError, WireError
from router_replay.spec import RouterSpec


def check_and_salt(processor: Any, request: Any) -> None:
    """Refuse rows that do not fit, and salt the prefix cache of requests with forced rows.

    The salt keeps KV entries made under forced rows from being shared with other requests. The engine core gets the
    rows as bytes, so that it need not unpack and check them again between two steps. The rows are sorted, so that equal
    sets give the same sums of experts and the same prefix, whatever their original order.
    """
    from vllm.exceptions import VLLMValidationError  # both servers answer this error with HTTP 400

    parameters = request.sampling_params
    given = rows_given(parameters)
    if given is None:
        return
    try:
        rows, blob = _checked(given, _spec_of(processor))
    except (RouterReplayError, ValueError, TypeError) as error:
        raise VLLMValidationError(f"extra_args.{EXTRA_ARGUMENT}: {error}") from error
    tokens = len(request.prompt_token_ids or ())
    if rows > tokens:
        raise VLLMValidationError(
            f"extra_args.{EXTRA_ARGUMENT}: {rows} forced rows for a prompt of {tokens} tokens, expected at most one "
            "row for each prompt token"
        )
    parameters.extra_args = {**parameters.extra_args, EXTRA_ARGUMENT: blob}
    request.cache_salt = f"{request.cache_salt or ''}#{xxhash.xxh3_128_hexdigest(blob)}"


def _checked(given: str | bytes, spec: RouterSpec) -> tuple[int, bytes]:
    """Return the number of rows, and the rows sorted and encoded. Rows of this process were checked when made."""
    if not isinstance(given, CheckedRows):
        routes = routes_of(given, spec)
        return len(routes), wire.encode(routes.sorted(), codec="dense")
    header = wire.read_header(given)
    if header.spec != spec:
        raise WireError(f"the rows are those of another model: expected {spec}, got {header.spec}")
    return header.rows, bytes(given)


def _spec_of(processor: Any) -> RouterSpec:
    """Return the router spec, read once from the config, and only for requests with rows: dense models have no spec."""
    if not hasattr(processor, "router_replay_spec"):
        processor.router_replay_spec = RouterSpec.from_config(processor.model_config.hf_config)
    spec: RouterSpec = processor.router_replay_spec
    return spec


def install() -> None:
    """Wrap InputProcessor.process_inputs, because vLLM has no hook where a plugin can check a request."""
    from vllm.v1.engine.input_processor import InputProcessor

    seams.wrap(InputProcessor, "process_inputs", _checking)


def _checking(original: Any) -> Any:
    def process_inputs(self: Any, *arguments: Any, **more: Any) -> Any:
        request = original(self, *arguments, **more)
        check_and_salt(self, request)
        return request

    return process_inputs
