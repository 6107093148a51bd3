"""Asks a server which model folder it serves, for the tokenizer of a gateway that was not given one."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from router_replay.engines.http import Http
from router_replay.errors import EngineError


def served_folder(url: str, kind: str, api_key: str | None = None) -> str:
    """Return the folder of the model that the server at `url` serves, if this machine has it.

    `kind` is "vllm", "sglang" or "dynamo"; a Dynamo does not say it. `api_key` is the server's key. Raises EngineError
    if the server does not say it, or if the folder is on another machine.
    """
    found = asyncio.run(_asked(url, kind, api_key))
    if not isinstance(found, str) or not os.path.isdir(found):
        said = f"says {found!r:.200}, which is not a folder of this machine" if found else "does not say its folder"
        raise EngineError(f"the server at {url} {said}: give the model's folder with --model")
    return found


async def _asked(url: str, kind: str, api_key: str | None) -> Any:
    if kind == "dynamo":
        return None
    http = Http(url, 30.0, kind, api_key=api_key)
    try:
        if kind == "sglang":
            return (await http.expect_object("GET", "/get_model_info", repeat=True)).get("model_path")
        models = (await http.expect_object("GET", "/v1/models", repeat=True)).get("data")
        return models[0].get("root") if isinstance(models, list) and models and isinstance(models[0], dict) else None
    finally:
        await http.close()
