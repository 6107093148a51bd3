"""The fields that are sent, the fields that are read, and what is refused."""

from __future__ import annotations

import uuid

import pytest

from router_replay import wire
from router_replay.engines import Request, Sampling
from router_replay.engines.dynamo import DynamoEngine
from router_replay.errors import EngineError
from tests.engines.dynamo.server import (
    CANCELLED,
    COMPLETIONS,
    DIED,
    END,
    GENERATE,
    PROMPT,
    SPEC,
    answer,
    generated,
    one,
    only_completions,
    recorded,
)
from tests.engines.stub import Reply, Stub
from tests.makers import random_routes


def test_the_recorded_answers_are_read(engine: DynamoEngine, whole: DynamoEngine, stub: Stub) -> None:
    """One greedy request by both routes of one real Dynamo: tokens, log-probs and rows are the same."""
    only_completions(stub, Reply(recorded("completions")))
    stub.answers[GENERATE] = Reply(recorded("generate"))
    request = Request(PROMPT, Sampling(3, 0.0, ignore_eos=True))
    first, second = one(engine, request), one(whole, request)
    assert len(first.routes) == 6
    assert first.routes.same_sets(second.routes)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.logprobs.tolist() == second.logprobs.tolist()
    assert first.finish_reason == second.finish_reason == "length"


# -- completions --------------------------------------------------------------------------------------


def test_a_completions_request(engine: DynamoEngine, stub: Stub) -> None:
    one(engine, Request(PROMPT, Sampling(9, top_p=0.9, seed=4, stop_token_ids=(3,)), start=2))
    [body] = stub.bodies(COMPLETIONS)
    assert body["nvext"] == {
        "extra_fields": ["completion_token_ids", "routed_experts"],
        "cache_salt": "router-replay-version-0-0",
    }
    assert body["prompt"] == list(PROMPT)
    wanted = {"model": "moe", "max_tokens": 9, "temperature": 1.0, "top_p": 0.9, "seed": 4, "stop_token_ids": [3]}
    # What a request leaves out, Dynamo takes from the model's generation_config.json.
    wanted |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0}
    wanted |= {"frequency_penalty": 0.0, "logprobs": 1, "ignore_eos": False, "stream": False}
    assert {name: body[name] for name in wanted} == wanted
    assert uuid.UUID(stub.headers[0]["x-dynamo-request-id"])


def test_one_call_per_sample(engine: DynamoEngine, stub: Stub) -> None:
    """Completions take no n above 1 with token ids."""
    samples = engine.generate([Request(PROMPT, Sampling(max_tokens=3, n=3, seed=7))])
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert sorted(body["seed"] for body in stub.bodies(COMPLETIONS)) == [7, 8, 9]
    assert all(body.get("n", 1) == 1 for body in stub.bodies(COMPLETIONS))
    assert len({headers["x-dynamo-request-id"] for headers in stub.headers}) == 3


def test_rows_before_the_start_are_cut_off_here(engine: DynamoEngine, stub: Stub) -> None:
    routes = random_routes(6, SPEC, seed=3)
    for value in (wire.to_dynamo(routes), wire.to_sglang(routes)):  # SGLang workers send SGLang's own text
        only_completions(stub, answer(nvext={"routed_experts": value}))
        completion = one(engine, Request(PROMPT, Sampling(max_tokens=3), start=2))
        assert completion.start == 2
        assert completion.routes.same_sets(routes[2:])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"<html>"), "not the expected JSON"),
        (Reply({"choices": []}), "got 0"),
        (Reply({"choices": [{"index": 0}, {"index": 1}]}), "got 2"),
        (Reply({"choices": [{"index": 0}]}), "the answer has no usage"),
        (answer(nvext={"routed_experts": None}), "vLLM up to 0.30 loses the rows.*ROUTER_REPLAY_VLLM=1"),
        (answer(nvext={"completion_token_ids": None}), "completion_token_ids"),
        (answer(nvext={"completion_token_ids": [1, 2]}), "a log-prob for each of 2 tokens"),
        (answer(logprobs=None), "a log-prob for each of 3 tokens"),
        (answer(logprobs={"token_logprobs": [-1.0, None, -1.0]}), "a log-prob for each of 3 tokens"),
        (answer(finish_reason="content_filter"), "content_filter"),
        (answer(start=1), "rows from position 0 on, got rows from 1 on"),
        (answer(routes=random_routes(5, SPEC)), "expected 6 rows"),
        (answer(usage={"prompt_tokens": 6}), r"a prompt of 4 tokens, Dynamo computed one of 6.*migration"),
        (answer(nvext={"routed_experts": {"data": "AAAA", "shape": [6, 4, 4], "start": 0, "dtype": "uint8"}}), "bytes"),
        (
            answer(nvext={"routed_experts": {"data": "AAAA", "shape": [1, 4, 4], "start": 9, "dtype": "uint8"}}),
            "at most prompt_length=4, got 9",
        ),
        (answer(nvext={"routed_experts": {"data": ""}}), "shape"),
        (DIED, "internal server error.*a worker died"),
    ],
)
def test_bad_answers_are_refused(engine: DynamoEngine, stub: Stub, reply: Reply, reason: str) -> None:
    stub.answers[COMPLETIONS] = reply
    with pytest.raises(EngineError, match=reason):
        one(engine)


def test_half_an_answer_is_no_sample(engine: DynamoEngine, stub: Stub) -> None:
    stub.answers[COMPLETIONS] = Reply(answer().body, sent=50)
    with pytest.raises(EngineError, match="broke before the answer was complete"):
        one(engine)
    assert len(stub.bodies(COMPLETIONS)) == 1


@pytest.mark.parametrize(
    ("said", "last", "sampling", "meant"),
    [
        ("stop", END, Sampling(9), "stop"),
        ("stop", 30, Sampling(9, stop_token_ids=(30,)), "stop"),
        ("stop", 30, Sampling(9), "abort"),  # what Dynamo says of an aborted request
        ("stop", END, Sampling(9, ignore_eos=True), "abort"),
        ("length", 30, Sampling(3), "length"),
        ("cancelled", 30, Sampling(9), "abort"),
    ],
)
def test_how_a_completion_ended(
    engine: DynamoEngine, stub: Stub, said: str, last: int, sampling: Sampling, meant: str
) -> None:
    stub.answers[COMPLETIONS] = answer([20, 21, last], finish_reason=said)
    assert one(engine, Request(PROMPT, sampling)).finish_reason == meant


def test_an_abort_before_the_first_token(engine: DynamoEngine, stub: Stub) -> None:
    nothing = {"completion_token_ids": None, "routed_experts": None}
    stub.answers[COMPLETIONS] = answer([], routes=random_routes(1, SPEC), finish_reason="stop", nvext=nothing)
    completion = one(engine)
    assert (completion.finish_reason, len(completion.token_ids), len(completion.routes)) == ("abort", 0, 0)


def test_what_completions_cannot_do_is_refused(engine: DynamoEngine, stub: Stub) -> None:
    with pytest.raises(EngineError, match=r"ignores the stop tokens.*DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1"):
        one(engine, Request(PROMPT, Sampling(3, stop_token_ids=(3,), ignore_eos=True)))
    with pytest.raises(EngineError, match="DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1"):
        one(engine, Request(PROMPT, Sampling(3), forced_routes=random_routes(2, SPEC)))
    with DynamoEngine(stub.url, SPEC) as unsure, pytest.raises(EngineError, match="pass end_of_sequence="):
        one(unsure)


# -- the generate route -------------------------------------------------------------------------------


def test_a_generate_request(whole: DynamoEngine, stub: Stub) -> None:
    stub.answers[GENERATE] = generated(start=2, n=2)
    forced = random_routes(2, SPEC)
    sampling = Sampling(9, 0.7, seed=4, stop_token_ids=(3,), n=2)
    samples = whole.generate([Request(PROMPT, sampling, start=2, forced_routes=forced)])
    assert [sample.index for sample in samples] == [0, 1]
    [body] = stub.bodies(GENERATE)
    assert (body["model"], body["token_ids"]) == ("moe", list(PROMPT))
    assert body["cache_salt"] == "router-replay-version-0-0"
    given = body["sampling_params"]
    assert (given["n"], given["max_tokens"], given["temperature"], given["seed"]) == (2, 9, 0.7, 4)
    assert given["routed_experts_prompt_start"] == 2
    assert given["stop_token_ids"] == [3, END]
    assert given["extra_args"]["router_replay"]
    assert uuid.UUID(stub.headers[0]["x-dynamo-request-id"])


def test_an_aborted_generate_is_an_empty_abort(whole: DynamoEngine, stub: Stub) -> None:
    stub.answers[GENERATE] = CANCELLED
    samples = whole.generate([Request(PROMPT, Sampling(9, n=2))])
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in samples] == [("abort", 0)] * 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"<html>"), "not the expected JSON"),
        (generated(n=2), "asked for 1 samples, got 2"),
        (generated(routed_experts=None), "vLLM up to 0.30 loses the rows"),
        (generated(start=1), "rows from position 0 on, got rows from 1 on"),
        (generated(finish_reason="content_filter"), "content_filter"),
        (generated(logprobs=None), "3 tokens, 0 log-probs"),
        (generated(routed_experts="AAAA"), "Dynamo"),
        (DIED, "a worker died"),
    ],
)
def test_bad_generate_answers_are_refused(whole: DynamoEngine, stub: Stub, reply: Reply, reason: str) -> None:
    stub.answers[GENERATE] = reply
    with pytest.raises(EngineError, match=reason):
        one(whole)
