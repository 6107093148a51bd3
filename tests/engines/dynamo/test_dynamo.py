"""Dynamo's contract: the fields that are sent, the fields that are read, and what is refused."""

from __future__ import annotations

import threading

import pytest

from router_replay import wire
from router_replay.engines import Completion, Request, Sampling
from router_replay.engines.dynamo import DynamoEngine, prompt_start
from router_replay.errors import EngineError
from tests.engines.dynamo.server import PROMPT, SPEC, answer, one
from tests.engines.stub import Reply, Stub, eventually
from tests.makers import random_routes


def test_the_request(engine: DynamoEngine, stub: Stub) -> None:
    stub.answers["/v1/completions"] = answer(start=2)
    sampling = Sampling(max_tokens=9, temperature=0.7, top_p=0.9, seed=4, stop_token_ids=(3,))
    one(engine, Request(PROMPT, sampling, start=2))
    [body] = stub.bodies("/v1/completions")
    assert body["model"] == "moe"
    assert body["prompt"] == [5, 6, 7, 8]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (9, 0.7, 0.9, 4)
    assert (body["stop_token_ids"], body["ignore_eos"], body["stream"]) == ([3], False, False)
    assert body["logprobs"] == 1
    assert body["nvext"] == {
        "extra_fields": ["completion_token_ids", "routed_experts"],
        "routed_experts_prompt_start": 2,
        "cache_salt": "router-replay-0",
    }


@pytest.mark.parametrize(("given", "sent"), [(-3, 0), (-1, 0), (0, 0), (3, 3), (4, 4), (5, 4), (99, 4)])
def test_prompt_start_is_clamped_as_dynamo_does(given: int, sent: int) -> None:
    assert prompt_start(given, 4) == sent


def test_one_call_per_sample(engine: DynamoEngine, stub: Stub) -> None:
    """nvext holds the tokens and rows of one choice."""
    samples = engine.generate([Request(PROMPT, Sampling(max_tokens=3, n=3, seed=7))])
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert sorted(body["seed"] for body in stub.bodies("/v1/completions")) == [7, 8, 9]
    assert all(body.get("n", 1) == 1 for body in stub.bodies("/v1/completions"))


def test_the_answer(engine: DynamoEngine, stub: Stub) -> None:
    routes = random_routes(4, SPEC, seed=3)
    stub.answers["/v1/completions"] = answer(start=2, routes=routes, finish_reason="stop")
    completion = one(engine, Request(PROMPT, Sampling(max_tokens=3), start=2))
    assert completion.routes.same_sets(routes)
    assert completion.start == 2
    assert completion.token_ids.tolist() == [10, 11, 12]
    assert completion.finish_reason == "stop"
    assert completion.versions.tolist() == [0, 0, 0]


def test_in_front_of_sglang_the_rows_are_text(engine: DynamoEngine, stub: Stub) -> None:
    routes = random_routes(6, SPEC, seed=3)
    stub.answers["/v1/completions"] = answer(nvext={"routed_experts": wire.to_sglang(routes)})
    assert one(engine).routes.same_sets(routes)
    # SGLang's text has no start, and Dynamo does not pass ours on: the whole comes, and is taken as the whole.
    assert one(engine, Request(PROMPT, Sampling(max_tokens=3), start=2)).start == 0


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"<html>"), "not the expected JSON"),
        (Reply({"choices": []}), "got 0"),
        (Reply({"choices": [{"index": 0}, {"index": 1}]}), "got 2"),
        (answer(nvext={"routed_experts": None}), "enable-return-routed-experts"),
        (answer(nvext={"completion_token_ids": None}), "completion_token_ids"),
        (answer(nvext={"completion_token_ids": [1, 2]}), "a log-prob for each of 2 tokens"),
        (answer(logprobs=None), "a log-prob for each of 3 tokens"),
        (answer(logprobs={"token_logprobs": [-1.0, None, -1.0]}), "a log-prob for each of 3 tokens"),
        (answer(finish_reason="content_filter"), "content_filter"),
        (answer(start=1), "do not support nvext.routed_experts_prompt_start"),
        (answer(routes=random_routes(5, SPEC)), "expected 6 rows"),
        (answer(nvext={"routed_experts": {"data": "AAAA", "shape": [6, 3, 4], "start": 0, "dtype": "uint8"}}), "bytes"),
        (
            answer(nvext={"routed_experts": {"data": "AAAA", "shape": [1, 3, 4], "start": 9, "dtype": "uint8"}}),
            "beyond",
        ),
        (answer(nvext={"routed_experts": {"data": ""}}), "shape"),
        (Reply({"message": "model is loading", "type": "x", "code": 500}, 500), "model is loading"),
    ],
)
def test_bad_answers_are_refused(engine: DynamoEngine, stub: Stub, reply: Reply, reason: str) -> None:
    stub.answers["/v1/completions"] = reply
    with pytest.raises(EngineError, match=reason):
        one(engine)


def test_half_an_answer_is_no_sample(engine: DynamoEngine, stub: Stub) -> None:
    stub.answers["/v1/completions"] = Reply(answer().body, sent=50)
    with pytest.raises(EngineError, match="broke before the answer was complete"):
        one(engine)
    assert len(stub.bodies("/v1/completions")) == 1


def test_abort_closes_the_connection(engine: DynamoEngine, stub: Stub) -> None:
    """The frontend has no abort by name; nothing of what was generated comes back, and that is said."""
    stub.answers["/v1/completions"] = Reply(answer().body, seconds=5)
    landed: list[Completion] = []
    request = Request(PROMPT, Sampling(max_tokens=3, n=2), id="mine")
    thread = threading.Thread(target=lambda: landed.extend(engine.generate([request])))
    thread.start()
    eventually(lambda: len(stub.bodies("/v1/completions")) == 2)
    partial = engine.abort(["mine"])
    thread.join(10)
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in partial] == [("abort", 0)] * 2
    assert landed == partial


def test_weights_go_to_every_worker_while_it_is_held(stub: Stub) -> None:
    with DynamoEngine(stub.url, SPEC, workers=[stub.url, stub.url]) as engine:
        engine.update_weights("/weights/3", version=3)
        asked = [path for path, _ in stub.asked if path.startswith("/engine/")]
        order = ["pause_generation", "update_weights_from_disk", "resume_generation"]
        assert asked == [f"/engine/{name}" for name in order for _ in range(2)]
        assert stub.bodies("/engine/update_weights_from_disk")[0] == {"model_path": "/weights/3", "weight_version": "3"}
        assert one(engine).versions.tolist() == [3, 3, 3]
        assert stub.bodies("/v1/completions")[-1]["nvext"]["cache_salt"] == "router-replay-3"


def test_a_worker_that_says_error_with_200_ends_the_engine(engine: DynamoEngine, stub: Stub) -> None:
    stub.answers["/engine/update_weights_from_disk"] = Reply({"status": "error", "message": "no such folder"})
    with pytest.raises(EngineError, match="no such folder"):
        engine.update_weights("/nowhere", version=1)
    with pytest.raises(EngineError, match="may serve different weights"):
        one(engine)


def test_without_workers_it_says_what_it_cannot_do(stub: Stub) -> None:
    with DynamoEngine(stub.url, SPEC) as engine:
        assert not engine.capabilities.versions
        assert "no workers=" in engine.capabilities.why_not
        with pytest.raises(EngineError, match="weights cannot be loaded"):
            engine.update_weights("/weights", version=1)
        assert one(engine).versions.tolist() == [0, 0, 0]


def test_connecting(stub: Stub) -> None:
    with pytest.raises(EngineError, match="pass model="):
        DynamoEngine(stub.url, SPEC, model="other")
    stub.answers["/v1/models"] = Reply({"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(EngineError, match="pass model="):
        DynamoEngine(stub.url, SPEC)
    with pytest.raises(EngineError, match="kv_transfer_config"):
        DynamoEngine(stub.url, SPEC, model="a", settings={"kv_transfer_config": {"kv_connector": "NixlConnector"}})
    stub.answers["/v1/models"] = Reply([1])
    with pytest.raises(EngineError, match="Is this Dynamo"):
        DynamoEngine(stub.url, SPEC)
