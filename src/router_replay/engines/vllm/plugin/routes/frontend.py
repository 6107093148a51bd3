"""What runs where requests enter vLLM: rows that no router could have produced never reach the engine.

An error inside the engine core ends the server; here it is an error of one request (HTTP 400). The
prefix cache knows tokens only, so KV made under forced rows gets a salt of its own.
"""

from __future__ import annotations

from typing import Any

import xxhash

from router_replay import wire
from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.requests import EXTRA_ARGUMENT, routes_of, rows_given
from router_replay.errors import RouterReplayError
from router_replay.spec import RouterSpec


def check_and_salt(processor: Any, request: Any) -> None:
    """Refuse rows that do not fit, and keep KV made under forced rows out of everybody else's prefixes.

    The engine core gets them as bytes: it need not unpack and check them once more between two steps. Sorted, so that
    the same sets are the same sums of experts and the same prefix, however they came.
    """
    from vllm.exceptions import VLLMValidationError  # what both servers answer with HTTP 400

    parameters = request.sampling_params
    given = rows_given(parameters)
    if given is None:
        return
    try:
        routes = routes_of(given, _spec_of(processor))
    except (RouterReplayError, ValueError, TypeError) as error:
        raise VLLMValidationError(f"extra_args.{EXTRA_ARGUMENT}: {error}") from error
    tokens = len(request.prompt_token_ids or ())
    if len(routes) > tokens:
        raise VLLMValidationError(f"extra_args.{EXTRA_ARGUMENT}: {len(routes)} forced rows, {tokens} prompt tokens")
    blob = wire.encode(routes.sorted(), codec="dense")
    parameters.extra_args = {**parameters.extra_args, EXTRA_ARGUMENT: blob}
    request.cache_salt = f"{request.cache_salt or ''}#{xxhash.xxh3_128_hexdigest(blob)}"


def _spec_of(processor: Any) -> RouterSpec:
    """Read off the config once; only for requests with rows, since a model without experts has none."""
    if not hasattr(processor, "router_replay_spec"):
        processor.router_replay_spec = RouterSpec.from_config(processor.model_config.hf_config)
    spec: RouterSpec = processor.router_replay_spec
    return spec


def install() -> None:
    """Wrap InputProcessor.process_inputs: vLLM has no hook where a plugin may check a request."""
    from vllm.v1.engine.input_processor import InputProcessor

    seams.wrap(InputProcessor, "process_inputs", _checking)


def _checking(original: Any) -> Any:
    def process_inputs(self: Any, *arguments: Any, **more: Any) -> Any:
        request = original(self, *arguments, **more)
        check_and_salt(self, request)
        return request

    return process_inputs
