"""What an SGLang server says, and a request in a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

from router_replay import wire
from router_replay.engines import Completion, Request, Sampling, SglangEngine
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.stub import Reply
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1), num_layers=2)
PROMPT = (5, 6, 7, 8)
INFO = {"version": "0.5.23", "enable_return_routed_experts": True, "disaggregation_mode": "null", "pp_size": 1}


def answer(tokens: int = 3, *, prompt: int = 4, start: int = 0, routes: Routes | None = None, **meta: Any) -> Reply:
    ids = [10 + number for number in range(tokens)]
    routes = random_routes(prompt + tokens - 1 - start, SPEC) if routes is None else routes
    information = {
        "id": "x",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": prompt,
        "weight_version": "default",
        "num_retractions": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "output_token_logprobs": [[-0.5 * number, token, None] for number, token in enumerate(ids)],
        "routed_experts": wire.to_sglang(routes),
    }
    return Reply({"output_ids": ids, "meta_info": {**information, **meta}})


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [{"version": name, "start": start, "end": end} for (name, end), start in zip(ends, starts, strict=False)]


def one(engine: SglangEngine, request: Request | None = None) -> Completion:
    [completion] = engine.generate([request or Request(PROMPT, Sampling(max_tokens=3))])
    return completion


class Background:
    """A request in a thread of its own."""

    def __init__(self, engine: SglangEngine, request: Request) -> None:
        self.landed: list[Completion] = []
        self.error: EngineError | None = None
        self._thread = threading.Thread(target=self._work, args=(engine, request))
        self._thread.start()

    def _work(self, engine: SglangEngine, request: Request) -> None:
        try:
            self.landed = engine.generate([request])
        except EngineError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()
