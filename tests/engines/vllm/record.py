"""Records the answers of a running vLLM server as test data: python -m tests.engines.vllm.record URL.

The server runs the first model of tests/engines/conftest.py with --enable-return-routed-experts and --enable-scale-out.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
import urllib.request
from typing import Any

from router_replay.engines import Request, Sampling
from router_replay.engines.backend import Flight
from router_replay.engines.vllm.token_routes import CompletionsRoute, GenerateRoute

PAYLOADS = pathlib.Path(__file__).parent / "payloads"
REQUEST = Request((5, 6, 7, 8, 9, 10), Sampling(max_tokens=3, n=2, seed=7, ignore_eos=True), start=2, id="recorded")
ROUTES = {"generate": GenerateRoute(), "completions": CompletionsRoute(cuts_rows=True, context=256)}


def main(url: str) -> None:
    """Ask both routes the same, and write each answer with its request into a file."""
    version = asked(f"{url}/version")["version"]
    for name, route in ROUTES.items():
        body = asyncio.run(body_of(name))
        answer = {**asked(url + route.path, body), "model": "model"}  # not the path of a machine
        told = {"version": version, "request": body, "answer": answer}
        file = PAYLOADS / f"vllm_{version}_{name}.json"
        file.write_text(json.dumps(told, indent=1) + "\n")
        sys.stdout.write(f"{file}\n")


async def body_of(name: str) -> dict[str, Any]:
    flight = Flight(REQUEST)
    flight.salt = "recorded"
    return {**ROUTES[name].body(flight, end_of_sequence=(1,)), "request_id": "recorded"}


def asked(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    main(sys.argv[1])
