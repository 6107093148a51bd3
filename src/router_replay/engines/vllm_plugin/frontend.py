"""What runs where requests enter vLLM: rows that no router could have produced never reach the engine.

An error inside the engine core ends the server; here it is an error of one request (HTTP 400). The
prefix cache knows tokens only, so KV made under forced rows gets a salt of its own.
"""

from __future__ import annotations

import base64
import binascii
import functools
from typing import Any

import xxhash

from router_replay import wire
from router_replay.engines.vllm_plugin import EXTRA_ARGUMENT
from router_replay.engines.vllm_plugin.forcing import routes_of
from router_replay.errors import RouterReplayError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec


def extra_arguments(routes: Routes) -> dict[str, str]:
    """What goes into SamplingParams.extra_args. Sets are half the bytes; where slot order has a meaning, it stays."""
    blob = wire.encode(routes, codec="dense" if routes.spec.ordered else "sets")
    return {EXTRA_ARGUMENT: base64.b64encode(blob).decode("ascii")}


def check_and_salt(request: Any, hf_config: Any) -> None:
    """Refuse rows that do not fit, and keep KV made under forced rows out of everybody else's prefixes."""
    from vllm.exceptions import VLLMValidationError  # a ValueError that both servers answer with HTTP 400

    parameters = request.sampling_params
    text = ((parameters.extra_args if parameters is not None else None) or {}).get(EXTRA_ARGUMENT)
    if text is None:
        return
    try:
        routes = routes_of(parameters, RouterSpec.from_config(hf_config))
    except (RouterReplayError, binascii.Error, TypeError) as error:
        raise VLLMValidationError(f"extra_args.{EXTRA_ARGUMENT}: {error}") from error
    tokens = len(request.prompt_token_ids or ())
    if routes is None or len(routes) > tokens:
        raise VLLMValidationError(
            f"extra_args.{EXTRA_ARGUMENT}: {0 if routes is None else len(routes)} forced rows, {tokens} prompt tokens"
        )
    request.cache_salt = f"{request.cache_salt or ''}#{xxhash.xxh3_128_hexdigest(text.encode())}"


def install() -> None:
    """Wrap InputProcessor.process_inputs once per process: vLLM has no hook where a plugin may check a request."""
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor.process_inputs, "router_replay", False):
        return
    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self: Any, *arguments: Any, **more: Any) -> Any:
        request = original(self, *arguments, **more)
        check_and_salt(request, self.model_config.hf_config)
        return request

    process_inputs.router_replay = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs
