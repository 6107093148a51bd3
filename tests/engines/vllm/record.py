"""The recorded answers of real vLLM servers. VLLM_RECORD=1 makes test_stock.py record those of the installed vLLM."""

from __future__ import annotations

import asyncio
import json
import pathlib
import urllib.error
import urllib.request
from typing import Any

from router_replay.engines import Request, Sampling
from router_replay.engines.backend import Flight
from router_replay.engines.vllm.token_routes import (
    COMPLETIONS_CUT_ROWS,
    GENERATE_COLLECTS,
    CompletionsRoute,
    GenerateRoute,
    TokenRoute,
)
from router_replay.engines.vllm.versions import numbers_of

PAYLOADS = pathlib.Path(__file__).parent / "payloads"
REQUEST = Request((5, 6, 7, 8, 9, 10), Sampling(max_tokens=3, n=2, seed=7, ignore_eos=True), start=2, id="recorded")
ROUTES = ("completions", "generate")
ROUTE_MUST_BE_ASKED_FOR = (0, 30)  # the first vLLM that has the generate route with --enable-scale-out only


def route_of(name: str, version: str) -> TokenRoute:
    if name == "generate":
        return GenerateRoute(collects=numbers_of(version) >= GENERATE_COLLECTS)
    return CompletionsRoute(cuts_rows=numbers_of(version) >= COMPLETIONS_CUT_ROWS, context=256)


def refusal_of_generate(version: str) -> int:
    """The status with which a server without --enable-scale-out refuses the generate route."""
    return 403 if numbers_of(version) >= (0, 32) else 404


def file_of(name: str, version: str) -> pathlib.Path:
    return PAYLOADS / f"vllm_{version}_{name}.json"


def record(name: str, url: str) -> None:
    """Ask one route of a server on the first model of tests/engines/conftest.py, and keep its answer."""
    version = asked(f"{url}/version")["version"]
    body = body_of(name, version)
    answer = {**asked(url + route_of(name, version).path, body), "model": "model"}  # not the path of a machine
    told = {"version": version, "request": body, "answer": answer}
    file_of(name, version).write_text(json.dumps(told, indent=1) + "\n")


def body_of(name: str, version: str) -> dict[str, Any]:
    async def body() -> dict[str, Any]:  # a flight belongs to an event loop
        flight = Flight(REQUEST)
        flight.salt = "recorded"
        return {**route_of(name, version).body(flight, end_of_sequence=(1,)), "request_id": "recorded"}

    return asyncio.run(body())


def status_of(url: str, body: Any) -> int:
    """What a server says to a request that may be refused."""
    try:
        asked(url, body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def asked(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
