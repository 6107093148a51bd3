"""Servers that mean harm, or are broken: every HTTP engine says so, takes nothing of it, and goes on afterwards."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router_replay import wire
from router_replay.engines import Completion, Engine, Request, Sampling, http
from router_replay.engines.dynamo import DynamoEngine
from router_replay.engines.http import answer_limit, checked_url
from router_replay.engines.sglang import SglangEngine
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.dynamo import server as dynamo_server
from tests.engines.sglang import server as sglang_server
from tests.engines.stub import Reply, Stub, serving
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1), num_layers=2)
PROMPT = (5, 6, 7, 8)
VOCABULARY = 100
DEEP = b"[" * 100_000 + b"]" * 100_000
Json = dict[str, Any]


def vllm_answer(tokens: int = 3) -> Json:
    content = [{"token": "x", "logprob": -0.5} for _ in range(tokens)]
    choice = {
        "index": 0, "token_ids": list(range(10, 10 + tokens)), "finish_reason": "length",
        "logprobs": {"content": content}, "routed_experts": wire.to_vllm(random_routes(3 + tokens, SPEC)),
    }  # fmt: skip
    return {"choices": [choice]}


def dynamo_answer(tokens: int = 3) -> Json:
    return dynamo_server.answer(
        tokens, nvext={"routed_experts": wire.to_dynamo(random_routes(3 + tokens, SPEC), 0)}
    ).body


@dataclasses.dataclass(frozen=True)
class Kind:
    """One engine, where its server generates, and how its answers are spoilt."""

    connect: Callable[..., Engine]
    connects_by: str
    generates_by: str
    answer: Callable[..., Json]
    tokens: Callable[[Json, list[Any]], None]
    logprobs: Callable[[Json, list[Any]], None]


def _vllm_logprobs(answer: Json, values: list[Any]) -> None:
    answer["choices"][0]["logprobs"]["content"] = [{"logprob": value} for value in values]


def _sglang_tokens(answer: Json, values: list[Any]) -> None:
    answer["output_ids"] = values
    answer["meta_info"]["output_token_logprobs"] = [[-0.5, value, None] for value in values]


def _sglang_logprobs(answer: Json, values: list[Any]) -> None:
    pairs = zip(values, answer["output_ids"], strict=True)
    answer["meta_info"]["output_token_logprobs"] = [[value, token, None] for value, token in pairs]


KINDS = {
    "vllm": Kind(
        lambda url, **more: VllmHttpEngine(url, spec=SPEC, vocabulary=VOCABULARY, **more),
        "/version",
        "/inference/v1/generate",
        vllm_answer,
        lambda answer, values: answer["choices"][0].update(token_ids=values),
        _vllm_logprobs,
    ),
    "sglang": Kind(
        lambda url, **more: SglangEngine(url, SPEC, vocabulary=VOCABULARY, **more),
        "/server_info",
        "/generate",
        lambda tokens=3: json.loads(json.dumps(sglang_server.answer(tokens).body)),
        _sglang_tokens,
        _sglang_logprobs,
    ),
    "dynamo": Kind(
        lambda url, **more: DynamoEngine(url, SPEC, vocabulary=VOCABULARY, end_of_sequence=[1], **more),
        "/v1/models",
        "/v1/completions",
        dynamo_answer,
        lambda answer, values: answer["nvext"].update(completion_token_ids=values),
        lambda answer, values: answer["choices"][0]["logprobs"].update(token_logprobs=values),
    ),
}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.001)
    with serving() as stub:
        stub.answers |= {
            "/version": Reply({"version": "0.30.0"}),
            "/get_world_size": Reply({"world_size": 1}),
            "/server_info": Reply(sglang_server.INFO),
            "/model_info": Reply({"model_path": "/not/here", "weight_version": "default"}),
            "/v1/models": Reply({"data": [{"id": "moe"}]}),
        }
        for kind in KINDS.values():
            stub.answers[kind.generates_by] = Reply(kind.answer())
        vllm = stub.answers["/inference/v1/generate"]
        # A client of Dynamo names the model, and its frontend is one without this route.
        stub.answers["/inference/v1/generate"] = lambda body: dynamo_server.NO_ROUTE if "model" in body else vllm
        yield stub


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def engine(kind: Kind, stub: Stub) -> Iterator[Engine]:
    with kind.connect(stub.url, timeout=120) as engine:
        yield engine


def one(engine: Engine) -> Completion:
    [completion] = engine.generate([Request(PROMPT, Sampling(max_tokens=3))])
    return completion


def patiently(engine: Engine) -> Completion:
    """An answer of an engine with a short timeout, which a busy machine may miss: it is asked again."""
    for _ in range(100):
        try:
            return one(engine)
        except EngineError as error:
            if "did not answer in time" not in str(error):
                raise
    raise AssertionError("the engine never answered in time again")


def refused(engine: Engine, kind: Kind, stub: Stub, reply: Reply, reason: str) -> None:
    """An EngineError with this reason, and the engine works afterwards."""
    stub.answers[kind.generates_by] = reply
    with pytest.raises(EngineError, match=reason):
        one(engine)
    stub.answers[kind.generates_by] = Reply(kind.answer())
    assert one(engine).token_ids.tolist() == [10, 11, 12]


# -- bodies -----------------------------------------------------------------------------------------


def endless() -> Iterator[bytes]:
    return itertools.repeat(b" " * 65536)


def nothing() -> Iterator[None]:
    return itertools.repeat(None)


def trickle() -> Iterator[bytes | None]:
    return itertools.cycle([b" ", None])


def test_a_body_without_end_is_cut_off_at_what_was_asked_for(engine: Engine, kind: Kind, stub: Stub) -> None:
    refused(engine, kind, stub, Reply(stream=endless), "sent more than the [0-9]+ bytes")
    limit = answer_limit(Request(PROMPT, Sampling(max_tokens=3)), SPEC, samples=1)
    assert stub.streamed < limit + (64 << 20)  # what lies in the buffers of two sockets


def test_the_limit_has_room_for_the_largest_honest_answer() -> None:
    """Rows of int32 as base64 (SGLang's), and log-probs with the bytes of long tokens (vLLM's)."""
    spec = RouterSpec(num_experts=256, top_k=8, layers=tuple(range(3, 61)), num_layers=61)
    request = Request(tuple(range(1000)), Sampling(max_tokens=500, n=4))
    sample = {
        "routed_experts": wire.to_sglang(random_routes(1499, spec)),
        "logprobs": [{"token": "x" * 100, "logprob": -1.2345678901234567, "bytes": [255] * 100}] * 500,
        "token_ids": [123456] * 1500,
    }
    size = len(json.dumps([sample] * 4))
    assert size < answer_limit(request, spec, samples=4) < 10 * size


def test_an_honest_answer_is_taken_in_any_pieces(engine: Engine, kind: Kind, stub: Stub) -> None:
    body = json.dumps(kind.answer()).encode()
    pieces = [body[at : at + 100] for at in range(0, len(body), 100)]
    stub.answers[kind.generates_by] = Reply(stream=lambda: iter([None, *pieces]))
    assert one(engine).token_ids.tolist() == [10, 11, 12]


@pytest.mark.parametrize("stream", [nothing, trickle])
def test_a_server_that_never_ends_its_answer_is_left_in_time(kind: Kind, stub: Stub, stream: Any) -> None:
    with kind.connect(stub.url, timeout=0.5) as engine:
        stub.answers[kind.generates_by] = Reply(stream=stream)
        with pytest.raises(EngineError, match="did not answer in time"):
            one(engine)
        stub.answers[kind.generates_by] = Reply(kind.answer())
        assert patiently(engine).token_ids.tolist() == [10, 11, 12]


def test_control_calls_do_not_wait_as_long_as_generations(
    kind: Kind, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONTROL_SECONDS", 0.3)
    stub.answers[kind.connects_by] = Reply(stream=nothing)
    started = time.monotonic()
    with pytest.raises(EngineError, match=f"{kind.connects_by} did not answer in time"):
        kind.connect(stub.url, timeout=3600.0)
    assert time.monotonic() - started < 30


def test_control_answers_have_a_limit_too(kind: Kind, stub: Stub) -> None:
    stub.answers[kind.connects_by] = Reply(stream=endless)
    with pytest.raises(EngineError, match="sent more than the 4194304 bytes"):
        kind.connect(stub.url)


def test_compressed_bodies_are_neither_asked_for_nor_taken(engine: Engine, kind: Kind, stub: Stub) -> None:
    packed = gzip.compress(json.dumps(kind.answer()).encode())
    bomb = Reply(packed, headers={"Content-Encoding": "gzip"})
    refused(engine, kind, stub, bomb, "Content-Encoding 'gzip', expected an uncompressed body")
    assert {headers["Accept-Encoding"] for headers in stub.headers} == {"identity"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(engine: Engine, kind: Kind, stub: Stub, status: int) -> None:
    with serving() as elsewhere:
        elsewhere.answers[kind.generates_by] = Reply(kind.answer())
        target = elsewhere.url.replace("http://", "http://user:secret@") + kind.generates_by
        reply = Reply({}, status, headers={"Location": target})
        refused(engine, kind, stub, reply, r"a redirect to 127\.0\.0\.1: redirects are not followed")
        stub.answers[kind.generates_by] = reply
        with pytest.raises(EngineError) as caught:
            one(engine)
        assert "secret" not in str(caught.value)
        assert elsewhere.asked == []


# -- what stands in them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (DEEP, "not the expected JSON"),
        (b'{"deep": ' + DEEP + b"}", "nested too deep"),
        (b"<html><body>busy</body></html>", "not the expected JSON"),
        (b"", "not the expected JSON"),
        (b"null", "not the expected JSON"),
        (b"[]", "not the expected JSON"),
        (b"{}", "not the expected JSON"),
        (b"\xff\xfe{}", "not the expected JSON"),
    ],
)
def test_bodies_that_are_no_answer(engine: Engine, kind: Kind, stub: Stub, body: bytes, reason: str) -> None:
    refused(engine, kind, stub, Reply(body), reason)


def test_an_error_of_the_server_is_told_in_its_words_however_it_is_packed(
    engine: Engine, kind: Kind, stub: Stub
) -> None:
    refused(engine, kind, stub, Reply(DEEP, 500), r"answered 500: \[\[\[")
    refused(engine, kind, stub, Reply({"error": {"message": "no\x1b[2Jroom"}}, 500), r"answered 500: no\?\[2Jroom")
    refused(
        engine,
        kind,
        stub,
        Reply({"error": "who are you"}, 401),
        r"answered 401: who are you\. Pass the server's key as api_key=",
    )


def test_the_words_of_a_server_do_not_fill_the_screen(engine: Engine, kind: Kind, stub: Stub) -> None:
    answer = json.dumps(kind.answer()).replace('"length"', json.dumps("\x1b]0;" + "x" * 500_000)).encode()
    stub.answers[kind.generates_by] = Reply(answer)
    with pytest.raises(EngineError, match="finish_reason") as caught:
        one(engine)
    assert len(str(caught.value)) < 5000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("value", [-1, VOCABULARY, 1 << 31, 1 << 64, 10**400, 1.0, True, "5", None])
def test_tokens_that_are_not_of_the_vocabulary_are_refused(engine: Engine, kind: Kind, stub: Stub, value: Any) -> None:
    answer = kind.answer()
    kind.tokens(answer, [10, value, 12])
    refused(engine, kind, stub, Reply(answer), "not the expected JSON|the vocabulary is|log-probs of")


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "-Infinity", "0.5", "-9999.0", "true", '"-1"', "null"])
def test_logprobs_that_no_sampled_token_has_are_refused(engine: Engine, kind: Kind, stub: Stub, value: str) -> None:
    answer = kind.answer()
    kind.logprobs(answer, [-0.5, -777.25, -0.5])
    body = json.dumps(answer).replace("-777.25", value).encode()
    refused(engine, kind, stub, Reply(body), "not the expected JSON|the log-prob of sampled token 1|log-prob")


def test_a_logprob_that_rounding_made_positive_is_kept_as_it_came(engine: Engine, kind: Kind, stub: Stub) -> None:
    answer = kind.answer()
    kind.logprobs(answer, [1e-6, -0.5, -0.5])
    stub.answers[kind.generates_by] = Reply(answer)
    assert one(engine).logprobs[0] == pytest.approx(1e-6)


def test_more_tokens_than_were_asked_for_are_refused(engine: Engine, kind: Kind, stub: Stub) -> None:
    refused(engine, kind, stub, Reply(kind.answer(4)), r"expected at most 3 tokens \(max_tokens\), got 4")


@pytest.mark.parametrize("name", ["vllm", "dynamo"])
@pytest.mark.parametrize("index", [1, -1, True, 0.0, "0", None, 1 << 70])
def test_the_index_of_a_choice(stub: Stub, name: str, index: Any) -> None:
    kind = KINDS[name]
    answer = kind.answer()
    answer["choices"][0]["index"] = index
    with kind.connect(stub.url) as engine:
        refused(
            engine,
            kind,
            stub,
            Reply(answer),
            "not the expected JSON|asked for 1 samples|expected index 0 of the only choice",
        )


@pytest.mark.parametrize("indices", [[], [0], [0, 0], [0, 2], [0, 1, 2], [1, 1]])
def test_wrong_sets_of_choices(stub: Stub, indices: list[int]) -> None:
    """Only vLLM's has more than one choice; the other engines ask for each sample alone."""
    kind = KINDS["vllm"]
    [choice] = vllm_answer()["choices"]
    with kind.connect(stub.url) as engine:
        stub.answers[kind.generates_by] = Reply({"choices": [{**choice, "index": index} for index in indices]})
        with pytest.raises(EngineError, match="asked for 2 samples"):
            engine.generate([Request(PROMPT, Sampling(max_tokens=3, n=2))])
        stub.answers[kind.generates_by] = Reply({"choices": [{**choice, "index": index} for index in (1, 0)]})
        assert len(engine.generate([Request(PROMPT, Sampling(max_tokens=3, n=2))])) == 2


def test_sglangs_spans_of_versions_that_run_backwards(stub: Stub) -> None:
    spans = sglang_server.spans(("default", 5), ("default", 3))
    with KINDS["sglang"].connect(stub.url) as engine:
        refused(engine, KINDS["sglang"], stub, sglang_server.answer(weight_versions=spans), "do not cover")


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"', DEEP, b"<html>"])
def test_control_answers_of_another_kind_are_refused_when_connecting(kind: Kind, stub: Stub, body: bytes) -> None:
    stub.answers[kind.connects_by] = Reply(body)
    with pytest.raises(EngineError) as caught:
        kind.connect(stub.url)
    assert len(str(caught.value)) < 1000


MODEL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 100,
}  # fmt: skip


def report(config: Any = MODEL, **changes: Any) -> Json:
    said = {
        "captures": True, "forced_routes": True, "reason": "", "logprobs_mode": "processed_logprobs",
        "config": json.dumps(config), "generation_config": '{"eos_token_id": [1]}',
    }  # fmt: skip
    return {"results": [said | changes]}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"results": []},
        {"results": [3]},
        {"results": None},
        report(captures="yes"),
        report(config=[]),
        report(config=DEEP.decode()),
        report(MODEL | {"num_hidden_layers": 10**12}),
        report(MODEL | {"num_experts": 10**12}),
        report(MODEL | {"mlp_only_layers": 5}),
        report(generation_config='{"eos_token_id": 1.5}'),
        report(generation_config="{"),
        report(MODEL | {"vocab_size": 99}),
    ],
)
def test_a_plugins_report_that_cannot_be(stub: Stub, answer: Json) -> None:
    stub.answers["/collective_rpc"] = Reply(answer)
    with pytest.raises(EngineError, match=r"/collective_rpc"):
        VllmHttpEngine(stub.url, vocabulary=VOCABULARY)
    stub.answers["/collective_rpc"] = Reply(report())
    with VllmHttpEngine(stub.url) as engine:
        assert (engine.spec, engine.vocabulary) == (SPEC, 100)


@pytest.mark.parametrize(
    ("route", "reply"),
    [
        ("/collective_rpc", Reply({"results": [{}]})),
        ("/collective_rpc", Reply({"results": []})),
        ("/collective_rpc", Reply({"results": [{"reason": "", "progress": {"rr": -1}}]})),
        ("/collective_rpc", Reply({"results": [{"reason": "", "progress": 5}]})),
        ("/collective_rpc", Reply(DEEP)),
        ("/reset_prefix_cache", Reply(b"[]")),
        ("/reset_prefix_cache", Reply({"error": "no"}, 500)),
    ],
)
def test_vllm_that_loads_weights_and_then_fails_is_not_used_under_the_old_version(
    stub: Stub, route: str, reply: Reply
) -> None:
    loaded = Reply({"results": [{"reason": "", "progress": {}}]})
    stub.answers |= {
        "/collective_rpc": lambda body: Reply(report()) if "report" in body["method"] else loaded,
        "/pause": Reply({}), "/resume": Reply({}), "/reset_prefix_cache": Reply({"success": True}),
    }  # fmt: skip
    with VllmHttpEngine(stub.url) as engine:
        engine.update_weights("/somewhere", 1)
        assert engine.version == 1

        def spoilt(body: Json) -> Reply:
            return reply if "update_weights" in body["method"] else loaded

        stub.answers[route] = spoilt if route == "/collective_rpc" else reply
        with pytest.raises(EngineError, match="Restart vLLM, then create a new engine"):
            engine.update_weights("/somewhere", 2)
        with pytest.raises(EngineError, match="Restart vLLM, then create a new engine"):
            one(engine)


@pytest.mark.parametrize("route", ["/flush_cache", "/update_weight_version"])
def test_sglang_that_loads_weights_and_then_fails_is_not_used_under_the_old_name(stub: Stub, route: str) -> None:
    said = {"success": False, "message": "cache was not flushed"}
    stub.answers |= {
        "/update_weights_from_disk": Reply(said), "/pause_generation": Reply({}), "/continue_generation": Reply({}),
        "/flush_cache": Reply({}), "/update_weight_version": Reply({}),
    }  # fmt: skip
    stub.answers[route] = Reply(stream=endless)
    with KINDS["sglang"].connect(stub.url) as engine:
        with pytest.raises(EngineError, match="but could not flush its cache and set the version name"):
            engine.update_weights("/somewhere", 1)
        with pytest.raises(EngineError, match="but could not flush its cache and set the version name"):
            one(engine)


# -- keys -------------------------------------------------------------------------------------------


def test_the_key_goes_with_every_call(kind: Kind, stub: Stub) -> None:
    with kind.connect(stub.url, api_key="k-123") as engine:
        one(engine)
        assert "k-123" not in repr(engine)
    assert {headers.get("Authorization") for headers in stub.headers} == {"Bearer k-123"}
    stub.headers.clear()
    with kind.connect(stub.url) as engine:
        one(engine)
    assert {headers.get("Authorization") for headers in stub.headers} == {None}


@pytest.mark.parametrize("key", ["", "a b", "sec\r\nret: 1", "schlüssel", 5, b"secret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(kind: Kind, stub: Stub, key: Any) -> None:
    with pytest.raises(EngineError, match="api_key must") as caught:
        kind.connect(stub.url, api_key=key)
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@host:8000", "http://hunter2@host", "http://u:hunter2/x@host", "user:hunter2@host",
        "http://u:hunter2#@host", "http://host:hunter2@", " http://u:hunter2@h", "http://u:@hunter2@host",
    ],
)  # fmt: skip
def test_a_password_in_a_url_is_refused_and_not_shown(kind: Kind, url: str) -> None:
    with pytest.raises(EngineError, match=r"engine\.api_key_env") as caught:
        kind.connect(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://h:0", "http://h:x", "http://a b", 5])
def test_what_is_no_address_of_a_server_is_refused(kind: Kind, url: Any) -> None:
    with pytest.raises(EngineError, match="the URL of a server must be"):
        kind.connect(url)


def test_a_query_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(EngineError, match="neither a query nor a fragment") as caught:
        checked_url("http://host/?key=hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), None, "5", True])
def test_a_timeout_that_would_be_none_is_refused(kind: Kind, stub: Stub, timeout: Any) -> None:
    with pytest.raises(EngineError, match="timeout must be"):
        kind.connect(stub.url, timeout=timeout)
