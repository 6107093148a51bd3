"""vLLM over HTTP: what a server cannot do is said when connecting; what breaks on the way is never a sample."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from router_replay import wire
from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.plugin.inactive import NOTHING
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.conftest import GREEDY, KEY, LONG, Checkpoints, Servers, one, prompt
from tests.engines.stub import Reply, Stub, serving
from tests.makers import random_routes

pytest.importorskip("aiohttp")
SPEC = RouterSpec(16, 4, (1, 2, 3), num_layers=4)


def choice(tokens: int = 1, rows: int = 1, **changes: Any) -> dict[str, Any]:
    content = [{"token": "x", "logprob": -0.5}] * tokens
    given = {
        "index": 0, "token_ids": [5] * tokens, "finish_reason": "length", "logprobs": {"content": content},
        "routed_experts": wire.to_vllm(random_routes(rows, SPEC)),
    }  # fmt: skip
    return {"choices": [given | changes]}


@pytest.fixture
def fake() -> Iterator[Stub]:
    with serving() as stub:
        stub.answers["/version"] = Reply({"version": "0.30.0"})
        stub.answers["/inference/v1/generate"] = Reply(choice())
        yield stub


REQUEST = Request((7,), Sampling(max_tokens=1))


def test_a_server_outside_the_tested_range_is_refused(fake: Stub) -> None:
    fake.answers["/version"] = Reply({"version": "0.32.1"})
    with pytest.raises(EngineError, match=r"vLLM 0\.32\.1 is outside the tested range 0\.26 to 0\.30"):
        VllmHttpEngine(fake.url)


def test_a_server_without_the_token_route_is_refused(fake: Stub) -> None:
    del fake.answers["/inference/v1/generate"]
    with pytest.raises(EngineError, match="start it with --enable-scale-out"):
        VllmHttpEngine(fake.url)


def test_a_server_that_is_not_there() -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"no vLLM server at http://127\.0\.0\.1:9 after 5 attempts"):
        VllmHttpEngine("http://127.0.0.1:9")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("status", "reason"), [(404, "not in development mode"), (500, "plugin is not active")])
def test_a_server_without_the_plugin_says_what_is_missing(fake: Stub, status: int, reason: str) -> None:
    fake.answers["/collective_rpc"] = Reply({"error": {"message": "no"}}, status)
    with pytest.raises(EngineError, match=reason):
        VllmHttpEngine(fake.url)  # nor does it say what its model is
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert engine.capabilities.routes
        assert not engine.capabilities.forced_routes
        assert reason in engine.capabilities.why_not
        assert len(one(engine, REQUEST).token_ids) == 1
        with pytest.raises(EngineError, match=reason):
            engine.generate([Request((7,), forced_routes=random_routes(1, SPEC))])
        with pytest.raises(EngineError, match=reason):
            engine.update_weights("/anywhere", 1)


def test_a_server_whose_vllm_does_not_fit_says_which_seam(fake: Stub) -> None:
    report = {**NOTHING, "active": False, "reason": "Router Replay is NOT active in this vLLM: X.y does not exist"}
    fake.answers["/collective_rpc"] = Reply({"results": [report]})
    with pytest.raises(EngineError, match=r"NOT active in this vLLM: X\.y does not exist"):
        VllmHttpEngine(fake.url)
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert "X.y does not exist" in engine.capabilities.why_not
        assert not engine.capabilities.versions
        assert len(one(engine, REQUEST).token_ids) == 1


def test_a_server_that_captures_nothing_says_so(fake: Stub) -> None:
    fake.answers["/inference/v1/generate"] = Reply(choice(routed_experts=None))
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert not engine.capabilities.routes
        assert "without --enable-return-routed-experts" in engine.capabilities.why_not
        assert not one(engine, REQUEST).routes.captured.any()


def test_a_server_that_is_busy_is_asked_again_and_then_given_up(fake: Stub) -> None:
    full = {"error": {"message": "full"}}
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = [Reply(full, 503), Reply(full, 429), Reply(choice()), Reply(full, 503)]
        assert len(one(engine, REQUEST).token_ids) == 1
        fake.asked.clear()
        with pytest.raises(EngineError, match="answered 503: full"):
            one(engine, REQUEST)
        assert len(fake.asked) == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"index": "x"}]}, "is not the expected JSON"),
        (choice(index=1), "asked for 1 samples"),
        (choice(rows=2), "expected 1 rows"),
        (choice(logprobs=None), "1 tokens, 0 log-probs"),
        (choice(finish_reason="error"), "finish_reason 'error'"),
        (choice(routed_experts="AAAA"), "not a .npy file"),
    ],
)
def test_an_answer_that_does_not_fit_is_no_sample(fake: Stub, answer: Any, message: str) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = Reply(answer)
        with pytest.raises((EngineError, ValueError), match=message):
            one(engine, REQUEST)


def test_an_answer_that_breaks_off_is_no_sample(fake: Stub) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = Reply(choice(), sent=40)
        fake.asked.clear()
        with pytest.raises(EngineError, match="broke before the answer was complete"):
            one(engine, REQUEST)
        assert len(fake.asked) == 1  # a request that was begun is not sent again behind the caller's back


def test_a_server_that_is_too_slow(fake: Stub) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC, timeout=0.5) as engine:
        fake.answers["/inference/v1/generate"] = Reply(choice(), seconds=5)
        with pytest.raises(EngineError, match="did not answer in time"):
            one(engine, REQUEST)


def test_log_probs_of_another_temperature_are_refused(fake: Stub) -> None:
    with (
        VllmHttpEngine(fake.url, spec=SPEC) as engine,
        pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"),
    ):
        engine.generate([Request((7,), Sampling(max_tokens=1, temperature=0.7))])


# -- a real server ------------------------------------------------------------------------------------


def post(url: str, body: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("start", [0, 2, 5])
def test_rows_of_the_openai_routes(
    vllm_http_engine: Engine, servers: Servers, checkpoints: Checkpoints, start: int
) -> None:
    """Completions and chat return the rows of the same tokens on the token route."""
    tokens = (5, 6, 7, 8, 9)
    expected = one(vllm_http_engine, Request(tokens, Sampling(4, 0.0, ignore_eos=True)))
    common = {
        "model": checkpoints.b, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True,
        "routed_experts_prompt_start": start,
    }  # fmt: skip
    words = " ".join(f"t{token}" for token in tokens)
    for path, body in (
        ("/v1/completions", {"prompt": list(tokens)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
    ):
        status, answer = post(servers.ours.url + path, common | body)
        assert status == 200, answer
        rows = wire.from_vllm(answer["choices"][0]["routed_experts"], vllm_http_engine.spec)
        assert rows.same_sets(expected.routes[start:]), path


@pytest.mark.parametrize("text", ["AAAA", "not base64!", 5, None])
def test_bad_rows_are_an_error_of_the_request_and_the_server_lives(
    vllm_http_engine: Engine, servers: Servers, text: Any
) -> None:
    extra = {"extra_args": {"router_replay": text}, "max_tokens": 1}
    status, answer = post(servers.ours.url + "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": extra})
    assert status == (200 if text is None else 400)
    if text is not None:
        assert "extra_args.router_replay" in answer["error"]["message"]
    assert len(one(vllm_http_engine, Request(prompt(), GREEDY)).token_ids) == 20


def test_too_many_rows_are_an_error_of_the_request(vllm_http_engine: Engine, servers: Servers) -> None:
    from router_replay.engines.vllm.requests import extra_arguments

    extra = {"extra_args": extra_arguments(random_routes(3, vllm_http_engine.spec))}
    status, answer = post(servers.ours.url + "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": extra})
    assert (status, "3 forced rows, 2 prompt tokens" in answer["error"]["message"]) == (400, True)


def test_a_users_own_server_without_the_plugin_then_killed_in_the_middle_of_a_batch(
    vllm_http_engine: Engine, servers: Servers
) -> None:
    """One server for both, since it is gone afterwards."""
    spec, url = vllm_http_engine.spec, servers.plain.url
    with servers.plain.wait(lambda: VllmHttpEngine(url, spec=spec)) as engine:
        assert engine.capabilities.routes
        assert "plugin is not active" in engine.capabilities.why_not
        plain, ours = (one(server, Request(prompt(), GREEDY)) for server in (engine, vllm_http_engine))
        assert np.array_equal(plain.token_ids, ours.token_ids)
        assert plain.routes.same_sets(ours.routes)

        async def work() -> list[Any]:
            tasks = [asyncio.create_task(engine.submit(Request(prompt(seed), LONG))) for seed in range(6)]
            await asyncio.sleep(0.2)
            servers.plain.kill()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = asyncio.run(work())
        assert len(results) == 6
        assert all(isinstance(result, EngineError) for result in results), results
        with pytest.raises(EngineError, match=r"no vLLM server at .* after 5 attempts"):
            engine.generate([Request(prompt(), GREEDY)])
