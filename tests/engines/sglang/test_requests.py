"""What SglangEngine sends, and what it makes of SGLang's answers, good and bad, the OpenAI routes' among them.

The real server: tests/sglang_real.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from router_replay import wire
from router_replay.engines import Request, Sampling
from router_replay.engines.sglang import SglangEngine
from router_replay.engines.sglang.answers import routes_of_openai
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.sglang.server import INFO, PROMPT, SPEC, answer, one, spans
from tests.engines.stub import Reply, Stub, serving
from tests.makers import random_routes

RECORDED = pathlib.Path(__file__).parent / "payloads" / "sglang_generate.json"


# -- what is sent -----------------------------------------------------------------------------------


def test_the_request_says_everything(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(2, start=3)
    one(engine, Request(PROMPT, Sampling(max_tokens=9, temperature=0.7, top_p=0.9, stop_token_ids=(3,)), start=3))
    [body] = stub.bodies("/generate")
    assert body["input_ids"] == [5, 6, 7, 8]
    assert body["return_routed_experts"] is True
    assert body["routed_experts_start_len"] == 3
    assert body["return_logprob"] is True
    assert body["stream"] is False
    assert body["extra_key"] == "router-replay-default"
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["temperature"], sampling["top_p"]) == (9, 0.7, 0.9)
    assert (sampling["top_k"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (-1, [3], False)


def test_each_sample_is_a_request_of_its_own(engine: SglangEngine, stub: Stub) -> None:
    """A name that begins another would abort both: SGLang compares beginnings."""
    samples = engine.generate([Request(PROMPT, Sampling(max_tokens=3, n=12))])
    assert [sample.index for sample in samples] == list(range(12))
    names = [body["rid"] for body in stub.bodies("/generate")]
    assert len(set(names)) == 12
    assert not any(a != b and b.startswith(a) for a in names for b in names)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(seed=1), "enable-deterministic-inference"),
        (Sampling(ignore_eos=True, stop_token_ids=(3,)), "ignores stop tokens if ignore_eos is set"),
    ],
)
def test_what_sglang_would_ignore_is_refused(engine: SglangEngine, stub: Stub, sampling: Sampling, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        one(engine, Request(PROMPT, sampling))
    assert not stub.bodies("/generate")


def test_a_server_of_fixed_seeds_gets_one_per_sample(stub: Stub) -> None:
    stub.answers["/server_info"] = Reply({**INFO, "enable_deterministic_inference": True})
    with SglangEngine(stub.url, SPEC) as engine:
        engine.generate([Request(PROMPT, Sampling(max_tokens=3, seed=40, n=3))])
    assert sorted(body["sampling_params"]["sampling_seed"] for body in stub.bodies("/generate")) == [40, 41, 42]


def test_forced_routes_are_refused_with_the_reason(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="SGLang cannot force routes"):
        one(engine, Request(PROMPT, forced_routes=random_routes(3, SPEC)))


# -- what is read -----------------------------------------------------------------------------------


def test_a_recorded_answer_of_the_real_server() -> None:
    recorded = json.loads(RECORDED.read_text())
    with serving() as stub:
        stub.answers = {"/server_info": Reply(INFO), "/model_info": Reply({}), "/generate": Reply(recorded)}
        with SglangEngine(stub.url, SPEC) as engine:
            completion = one(engine, Request((1, 2, 3, 4, 5, 6), Sampling(max_tokens=4)))
    assert completion.token_ids.tolist() == recorded["output_ids"]
    assert len(completion.routes) == 6 + 4 - 1
    assert completion.routes.all_captured
    assert wire.to_sglang(completion.routes) == recorded["meta_info"]["routed_experts"]
    assert completion.logprobs[1] == pytest.approx(recorded["meta_info"]["output_token_logprobs"][1][0])


def test_rows_tokens_and_versions(engine: SglangEngine, stub: Stub) -> None:
    routes = random_routes(4, SPEC, seed=3)
    stub.answers["/generate"] = answer(3, start=2, routes=routes)
    completion = one(engine, Request(PROMPT, Sampling(max_tokens=3), start=2))
    assert completion.routes.same_sets(routes)
    assert completion.start == 2
    assert completion.token_ids.tolist() == [10, 11, 12]
    assert completion.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert completion.versions.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"<html>busy</html>"), "not the expected JSON"),
        (Reply({"output_ids": [1]}), "meta_info"),
        (answer(routed_experts=None), "without meta_info.routed_experts"),
        (answer(routed_experts="AAAA"), "expected whole rows"),
        (answer(routed_experts="?!"), "base64"),
        (answer(routes=random_routes(5, SPEC)), "expected 6 rows"),
        (answer(routed_experts=wire.to_sglang(random_routes(7, SPEC))), "expected 6 rows"),
        (answer(prompt_tokens=3, routed_experts=wire.to_sglang(random_routes(6, SPEC))), "cut the prompt"),
        (answer(finish_reason=None), "finish_reason"),
        (answer(finish_reason={"type": "error"}), "finish_reason"),
        (
            answer(output_token_logprobs=[[-1.0, 10, None]]),
            "log-probs of 3 sampled tokens, got the log-probs of 1 tokens",
        ),
        (answer(output_token_logprobs=[[-1.0, 9, None]] * 3), "of other tokens"),
        (answer(output_token_logprobs=[[None, 10, None], [-1, 11, None], [-1, 12, None]]), "has no log-prob"),
        (answer(weight_versions=None, weight_version=None), "which weights"),
        (answer(weight_versions=[{"version": "default", "start": 0, "end": 2}]), "do not cover"),
        (answer(weight_versions=[{"version": "theirs", "start": 0, "end": 3}]), "did not load"),
        (Reply({"error": {"message": "input is too long"}}, 400), "input is too long"),
        (Reply(b"oh no", 500), "answered 500: oh no"),
    ],
)
def test_bad_answers_are_refused(engine: SglangEngine, stub: Stub, reply: Reply, reason: str) -> None:
    stub.answers["/generate"] = reply
    with pytest.raises(EngineError, match=reason):
        one(engine)


def test_out_of_range_experts_are_refused(engine: SglangEngine, stub: Stub) -> None:
    wider = RouterSpec(num_experts=64, top_k=4, layers=(0, 1), num_layers=2)
    stub.answers["/generate"] = answer(routed_experts=wire.to_sglang(random_routes(6, wider)))
    with pytest.raises(EngineError, match=r"not all in \[0, 16\)"):
        one(engine)


# -- the OpenAI routes ------------------------------------------------------------------------------


def openai(choices: int = 1, **changes: Any) -> dict[str, Any]:
    response = {
        "choices": [{"index": number, "text": "w", "finish_reason": "length"} for number in range(choices)],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
        "metadata": {"weight_version": "default"},
        "sglext": {"routed_experts": wire.to_sglang(random_routes(6, SPEC))},
    }
    return {**response, **changes}


def test_sglext_of_an_openai_answer() -> None:
    assert routes_of_openai(openai(), SPEC).same_sets(random_routes(6, SPEC))
    assert len(routes_of_openai(json.dumps(openai()).encode(), SPEC)) == 6


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (openai(2), "2 choices, expected 1: sglext.routed_experts"),
        (openai(sglext=None), "no sglext.routed_experts"),
        (openai(usage={"prompt_tokens": 4, "completion_tokens": 2}), "expected 5 rows"),
        (openai(metadata={"weight_versions": spans(("0", 1), ("1", 3))}), "weights changed"),
        ({"error": "no"}, "expected an OpenAI response of SGLang"),
    ],
)
def test_openai_answers_that_do_not_hold(response: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        routes_of_openai(response, SPEC)
