"""A layer that an engine never records is found with top_k 1 too, where its zeros look like expert 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from router_replay import RouterSpec, Routes, wire
from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.backend import Flight
from router_replay.engines.capture_watch import CaptureWatch
from router_replay.engines.dynamo import DynamoEngine
from router_replay.engines.sglang import SglangEngine
from router_replay.engines.sglang.answers import routes_of_openai
from router_replay.engines.types import Capabilities
from router_replay.engines.vllm.client import Transport, VllmClient
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.inprocess import _InProcess
from router_replay.engines.vllm.samples import Sample
from router_replay.errors import EngineError
from tests.engines.dynamo import server as dynamo_server
from tests.engines.sglang import server as sglang_server
from tests.engines.stub import Reply, Stub, serving

TOP_1 = RouterSpec(num_experts=4, top_k=1, layers=(0, 1), num_layers=2)


def rows_of(count: int, last: int = 0) -> Routes:
    """Layer 1 is zero in every row but the last, which is `last`."""
    ids = np.ones((count, 2, 1), np.uint8)
    ids[:, 1] = 0
    ids[-1, 1] = last
    return Routes(ids, TOP_1)


class InProcess(_InProcess):
    """What reads vLLM's arrays in this process, with the arrays but without vLLM."""

    capabilities = Capabilities(routes=True, forced_routes=False, start=True, versions=True)

    def __init__(self) -> None:
        self.spec = TOP_1
        self.rows = rows_of(1)

    async def generate(self, flight: Flight) -> list[Sample]:
        logprobs = [{8: SimpleNamespace(logprob=-1.0)}]
        choice = {"index": 0, "token_ids": [8], "logprobs": logprobs, "finish_reason": "length"}
        return [self._sample(SimpleNamespace(**choice, routed_experts=self.rows.ids.copy()))]

    async def close(self) -> None: ...


async def connected(transport: Transport) -> Transport:
    return transport


def asked(engine: Engine, rows: Routes, answer: Callable[[Routes], None]) -> Any:
    """One completion token, so that there are as many rows as prompt tokens."""
    answer(rows)
    [completion] = engine.generate([Request((5,) * len(rows), Sampling(max_tokens=1))])
    assert completion.routes.same_sets(rows)
    return completion


@pytest.fixture(params=["vllm", "vllm_http", "sglang", "dynamo"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Callable[[Routes], Any]]]:
    """start(**keywords) makes the engine, and gives what asks it."""
    engines: list[Engine] = []

    def started(engine: Engine, answer: Callable[[Routes], None]) -> Callable[[Routes], Any]:
        engines.append(engine)
        return lambda rows: asked(engine, rows, answer)

    with serving() as stub:
        yield {
            "vllm": lambda **more: _vllm(started, **more),
            "vllm_http": lambda **more: _vllm_http(stub, started, **more),
            "sglang": lambda **more: _sglang(stub, started, **more),
            "dynamo": lambda **more: _dynamo(stub, started, **more),
        }[request.param]
        for engine in engines:
            engine.close()


def _vllm(started: Any, **more: Any) -> Any:
    transport = InProcess()
    return started(VllmClient(lambda: connected(transport), **more), lambda rows: setattr(transport, "rows", rows))


def _vllm_http(stub: Stub, started: Any, **more: Any) -> Any:
    def answer(rows: Routes) -> None:
        choice = {"index": 0, "token_ids": [8], "finish_reason": "length", "routed_experts": wire.to_vllm(rows)}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}]}
        stub.answers["/inference/v1/generate"] = Reply({"choices": [choice]})

    answer(rows_of(1))
    stub.answers["/version"] = Reply({"version": "0.30.0"})
    return started(VllmHttpEngine(stub.url, spec=TOP_1, timeout=60, **more), answer)


def _sglang(stub: Stub, started: Any, **more: Any) -> Any:
    stub.answers["/server_info"] = Reply(sglang_server.INFO)
    stub.answers["/model_info"] = Reply({"model_path": "/not/here", "weight_version": "default"})

    def answer(rows: Routes) -> None:
        stub.answers["/generate"] = sglang_server.answer(1, prompt=len(rows), routes=rows)

    return started(SglangEngine(stub.url, TOP_1, timeout=60, **more), answer)


def _dynamo(stub: Stub, started: Any, **more: Any) -> Any:
    stub.answers["/v1/models"] = Reply({"object": "list", "data": [{"id": "moe"}]})
    dynamo_server.only_completions(stub)

    def answer(rows: Routes) -> None:
        stub.answers["/v1/completions"] = dynamo_server.answer(1, routes=rows, usage={"prompt_tokens": len(rows)})

    return started(DynamoEngine(stub.url, TOP_1, timeout=60, end_of_sequence=[3], **more), answer)


def test_a_layer_that_is_zero_in_400_rows_is_refused(start: Any) -> None:
    with pytest.raises(EngineError, match=r"layers \[1\] hold only zeros in all 400 rows.*allow_zero_layers=True"):
        start()(rows_of(400))


def test_short_answers_add_up(start: Any) -> None:
    ask = start()
    for _ in range(7):
        ask(rows_of(8))
    with pytest.raises(EngineError, match=r"layers \[1\] hold only zeros in all 64 rows"):
        ask(rows_of(8))
    with pytest.raises(EngineError, match="72 rows"):  # and it stays refused
        ask(rows_of(8))


def test_one_other_expert_proves_that_the_layer_is_recorded(start: Any) -> None:
    ask = start()
    for _ in range(3):
        ask(rows_of(60))
        ask(rows_of(5, last=3))


def test_a_caller_who_means_expert_0_says_so(start: Any) -> None:
    ask = start(allow_zero_layers=True)
    ask(rows_of(400))
    ask(rows_of(8))


def test_rows_that_were_not_captured_do_not_count() -> None:
    watch = CaptureWatch(allow_zero_layers=False)
    routes = Routes(rows_of(70).ids, TOP_1, captured=np.arange(70) >= 60)
    completion: Any = SimpleNamespace(request_id="a", routes=routes)
    for _ in range(6):
        watch.check([completion], TOP_1)
    watch.check([SimpleNamespace(request_id="a", routes=Routes.missing(80, TOP_1))], TOP_1)  # type: ignore[list-item]
    with pytest.raises(EngineError, match="in all 70 rows"):
        watch.check([completion], TOP_1)


def test_an_openai_answer_of_sglang_alone_is_held_to_the_same() -> None:
    answer = {"choices": [{}], "sglext": {"routed_experts": wire.to_sglang(rows_of(64))}}
    with pytest.raises(EngineError, match=r"layers \[1\] hold only zeros in all 64 rows"):
        routes_of_openai(json.dumps(answer).encode(), TOP_1)
    assert len(routes_of_openai(answer, TOP_1, allow_zero_layers=True)) == 64
