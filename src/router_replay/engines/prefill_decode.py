"""Joins the answers of a prefill and a decode server: the first has the prompt's rows, the second all others.

whole = join_prefill_decode(prefill_completion, decode_completion, prompt_tokens=7)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from router_replay import _moved
from router_replay.engines.types import Completion
from router_replay.errors import EngineError
from router_replay.routes import Routes, row_count


def join_prefill_decode(prefill: Completion, decode: Completion, prompt_tokens: int) -> Completion:
    """Return one completion with the prompt's rows from `prefill` and all other rows from `decode`.

    The prefill server samples the first token and passes it on with the KV, so both completions must begin with it.
    Prompt rows from the decode server are discarded, because it never routed them. `prompt_tokens` is the length of
    the prompt. Raises EngineError if the two completions do not belong together.
    """
    place = f"{decode.request_id}, prefill and decode"
    if prefill.request_id != decode.request_id or prefill.index != decode.index:
        raise EngineError(
            f"{place}: these are answers to two requests: {prefill.request_id}[{prefill.index}] and "
            f"{decode.request_id}[{decode.index}]; join the two answers to one sample of one request"
        )
    if len(prefill.token_ids) != 1:
        raise EngineError(
            f"{place}: expected exactly one token from the prefill server, got {len(prefill.token_ids)}: pass the "
            "completion of the prefill server first"
        )
    if not len(decode.token_ids) or prefill.token_ids[0] != decode.token_ids[0]:
        first = decode.token_ids[0] if len(decode.token_ids) else "nothing"
        raise EngineError(
            f"{place}: the first token is {prefill.token_ids[0]} from the prefill server, but {first} from the decode "
            "server: these answers do not belong to one run"
        )
    versions = sorted({*prefill.versions.tolist(), *decode.versions.tolist()})
    if len(versions) > 1:
        raise EngineError(
            f"{place}: the answers come from policy versions {versions}, expected one version: the prompt and the "
            "completion were computed with different weights. Update both servers while no request is in flight, and "
            "generate again"
        )
    prefill.check(prompt_tokens)
    decode_start = decode.start
    if decode_start > prompt_tokens:
        raise EngineError(
            f"{place}: the decode rows start at position {decode_start}, expected at most {prompt_tokens}, the end of "
            "the prompt"
        )
    expected = row_count(prompt_tokens, len(decode.token_ids), decode_start)
    if len(decode.routes) != expected:
        raise EngineError(
            f"{place}: expected {expected} decode rows from position {decode_start} on, got {len(decode.routes)}"
        )
    start = prefill.start
    own = decode.routes[prompt_tokens - decode_start :]
    # The decode server's rows of the prompt are ignored: their KV slots were filled over the network.
    routes = Routes.join_prefill_decode(
        prefill.routes, own, prompt_length=prompt_tokens - start, decode_start=prompt_tokens - start
    )
    return dataclasses.replace(decode, routes=routes, start=start).check(prompt_tokens)


def without_prompt_rows(decode: Completion, prompt_tokens: int) -> Completion:
    """Return a decode server's answer with the prompt's rows marked as missing, so that they are routed live.

    `decode` is the answer, and `prompt_tokens` is the length of the prompt.
    """
    stale = max(0, min(len(decode.routes), prompt_tokens - decode.start))
    captured = decode.routes.captured.copy()
    captured[:stale] = False
    routes = Routes(decode.routes.ids, decode.routes.spec, captured=captured, versions=decode.routes.versions)
    return dataclasses.replace(decode, routes=routes)


def __getattr__(name: str) -> Any:
    return _moved.moved_name(__name__, name)
