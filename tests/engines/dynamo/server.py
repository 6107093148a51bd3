"""What a Dynamo frontend says."""

from __future__ import annotations

from typing import Any

from router_replay import wire
from router_replay.engines import Completion, DynamoEngine, Request, Sampling
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.stub import Reply
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(1, 2), num_layers=3)
PROMPT = (5, 6, 7, 8)


def answer(tokens: int = 3, *, start: int = 0, routes: Routes | None = None, **changes: Any) -> Reply:
    routes = random_routes(4 + tokens - 1 - start, SPEC) if routes is None else routes
    nvext = {
        "completion_token_ids": list(range(10, 10 + tokens)),
        "routed_experts": wire.to_dynamo(routes, start),
        "timing": {"ttft_ms": 3},
    }
    choice = {
        "index": 0,
        "text": "abc",
        "finish_reason": "length",
        "logprobs": {
            "token_logprobs": [-0.5] * tokens,
            "tokens": ["a"] * tokens,
            "text_offset": [],
            "top_logprobs": [],
        },
    }
    nvext |= changes.pop("nvext", {})
    return Reply({"choices": [{**choice, **changes}], "nvext": nvext})


def one(engine: DynamoEngine, request: Request | None = None) -> Completion:
    [completion] = engine.generate([request or Request(PROMPT, Sampling(max_tokens=3))])
    return completion
