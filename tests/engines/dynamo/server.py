"""What a Dynamo says, after answers that a real one gave (payloads/; `make test-dynamo` checks them)."""

from __future__ import annotations

import copy
import functools
import json
import pathlib
from typing import Any

from router_replay import wire
from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.stub import Reply, Stub
from tests.makers import random_routes

PAYLOADS = pathlib.Path(__file__).with_name("payloads")
SPEC = RouterSpec(num_experts=16, top_k=4, layers=(1, 2, 3), num_layers=4)
PROMPT = (5, 6, 7, 8)
END = 1  # of the sequence
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
PLUGIN = "/engine/router_replay"
OK = Reply({"status": "ok"})
NO_ROUTE = Reply({"message": f"Route not found: POST {GENERATE}", "type": "Not Found", "code": 404}, 404)
NO_PLUGIN = Reply({"error": "Route not found", "message": f"Route {PLUGIN} not found"}, 404)
UNKNOWN_FIELD = Reply(
    {
        "message": "Failed to deserialize: unknown field `routed_experts_prompt_start`",
        "type": "Bad Request",
        "code": 400,
    },
    400,
)
CANCELLED = Reply({"error": {"message": "request was cancelled", "type": "request_cancelled", "code": 499}}, 499)
DIED = Reply({"error": {"message": "internal server error", "type": "internal_error", "code": 500}}, 500)


@functools.cache
def _recorded(name: str) -> Any:
    return json.loads((PAYLOADS / f"{name}.json").read_text())


def recorded(name: str) -> Any:
    """An answer that a real Dynamo gave to PROMPT and three tokens."""
    return copy.deepcopy(_recorded(name))


def answer(
    tokens: int | list[int] = 3,
    *,
    start: int = 0,
    routes: Routes | None = None,
    logprobs: Any = (),
    **changes: Any,
) -> Reply:
    """An answer of /v1/completions: the recorded one with these tokens, rows and changes."""
    ids = list(range(10, 10 + tokens)) if isinstance(tokens, int) else tokens
    routes = random_routes(4 + len(ids) - 1 - start, SPEC) if routes is None else routes
    body = recorded("completions")
    body["nvext"] |= {"completion_token_ids": ids, "routed_experts": wire.to_dynamo(routes, start)}
    body["nvext"] |= changes.pop("nvext", {})
    body["usage"] |= {"completion_tokens": len(ids)}
    body["usage"] |= changes.pop("usage", {})
    [choice] = body["choices"]
    choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids)} if logprobs == () else logprobs
    choice.update(changes)
    return Reply(body)


def generated(tokens: int | list[int] = 3, *, start: int = 0, n: int = 1, **changes: Any) -> Reply:
    """An answer of /inference/v1/generate: the recorded one with these tokens and changes."""
    ids = list(range(10, 10 + tokens)) if isinstance(tokens, int) else tokens
    body = recorded("generate")
    [choice] = body["choices"]
    choice["token_ids"] = ids
    choice["logprobs"]["content"] = [{"token": "token_id:7", "logprob": -0.5} for _ in ids]
    choice["routed_experts"] = wire.to_dynamo(random_routes(4 + len(ids) - 1 - start, SPEC), start)
    choice.update(changes)
    body["choices"] = [{**choice, "index": index} for index in range(n)]
    return Reply(body)


def only_completions(stub: Stub, reply: Reply | None = None) -> None:
    """No generate route, and completions that refuse the field of the start, as every release does."""

    def complete(body: Any) -> Reply:
        return UNKNOWN_FIELD if "routed_experts_prompt_start" in body["nvext"] else reply or answer()

    stub.answers |= {GENERATE: NO_ROUTE, COMPLETIONS: complete}


class Plugin:
    """The route of our plugin in a worker."""

    def __init__(self) -> None:
        self.report = recorded("report")
        self.refuses = ""  # weights, with this reason
        self.progress: dict[str, int] = {}
        self.asked: list[Any] = []
        self.reset = True

    def __call__(self, body: Any) -> Reply:
        self.asked.append(body)
        results: dict[str, Any] = {
            "router_replay_report": self.report,
            "router_replay_find_weights": {"reason": self.refuses},
            "router_replay_update_weights": {"reason": self.refuses, "progress": self.progress},
        }
        if body["method"] in results:
            return Reply({"status": "ok", "results": [results[body["method"]]]})
        return Reply({"status": "ok", "reset": self.reset})

    def methods(self) -> list[str]:
        return [body["method"] for body in self.asked]


def one(engine: Engine, request: Request | None = None) -> Completion:
    [completion] = engine.generate([request or Request(PROMPT, Sampling(max_tokens=3))])
    return completion
