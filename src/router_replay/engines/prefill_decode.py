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
    Prompt rows from the decode server are discarded, because it never routed them.
    """
    place = f"{decode.request_id}, prefill and decode"
    if prefill.request_id != decode.request_id or prefill.index != decode.index:
        raise EngineError(
            f"{place}: answers of two requests: {prefill.request_id}[{prefill.index}] and "
            f"{decode.request_id}[{decode.index}]"
        )
    if len(prefill.token_ids) != 1:
        raise EngineError(
            f"{place}: a prefill server samples exactly one token, this answer has {len(prefill.token_ids)}"
        )
    if not len(decode.token_ids) or prefill.token_ids[0] != decode.token_ids[0]:
        first = decode.token_ids[0] if len(decode.token_ids) else "nothing"
        raise EngineError(
            f"{place}: the first token is {prefill.token_ids[0]} by the prefill server and {first} by the decode "
            "server: these answers are not of one run"
        )
    versions = sorted({*prefill.versions.tolist(), *decode.versions.tolist()})
    if len(versions) > 1:
        raise EngineError(
            f"{place}: computed by policy versions {versions}: the decode server's KV and the prompt's rows are of "
            "other weights than its own. Update both servers with nothing in flight, and generate again"
        )
    prefill.check(prompt_tokens)
    decode_start = decode.start
    if decode_start > prompt_tokens:
        raise EngineError(f"{place}: the decode rows start at {decode_start}, behind the prompt of {prompt_tokens}")
    expected = row_count(prompt_tokens, len(decode.token_ids), decode_start)
    if len(decode.routes) != expected:
        raise EngineError(f"{place}: expected {expected} decode rows from {decode_start} on, got {len(decode.routes)}")
    start = prefill.start
    own = decode.routes[prompt_tokens - decode_start :]
    # The decode server's rows of the prompt are ignored: their KV slots were filled over the network.
    routes = Routes.join_prefill_decode(
        prefill.routes, own, prompt_length=prompt_tokens - start, decode_start=prompt_tokens - start
    )
    return dataclasses.replace(decode, routes=routes, start=start).check(prompt_tokens)


def without_prompt_rows(decode: Completion, prompt_tokens: int) -> Completion:
    """Return a decode server's answer with the prompt's rows marked as missing, so that they are routed live."""
    stale = max(0, min(len(decode.routes), prompt_tokens - decode.start))
    captured = decode.routes.captured.copy()
    captured[:stale] = False
    routes = Routes(decode.routes.ids, decode.routes.spec, captured=captured, versions=decode.routes.versions)
    return dataclasses.replace(decode, routes=routes)


def __getattr__(name: str) -> Any:
    return _moved.moved_name(__name__, name)
