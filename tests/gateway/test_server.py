"""OpenAI's own client works with the gateway: sessions, streams, tools, keys, limits and errors."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from router_replay.engines import Engine
from router_replay.errors import EngineError, WireError
from router_replay.gateway import Gateway, GatewayServer, read_session
from router_replay.gateway.sessions import TURN_BYTES, bytes_per_token
from tests.gateway.conftest import client_of, http, say
from tests.gateway.talker import ADD, make_tokenizer

Client = Callable[..., Any]
Make = Callable[..., GatewayServer]
TOKENIZER = make_tokenizer()


def refused(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as error:
        http(method, url, body, **headers)
    return error.value.code, json.loads(error.value.read())["error"]


# -- sessions ---------------------------------------------------------------------------------------


def test_sessions_side_by_side_keep_their_own_trajectories(server: GatewayServer, client: Client) -> None:
    said = ["hello", "count", "drift", "3"]

    def play(number: int) -> list[str]:
        agent, words = client(f"agent-{number}"), said[number % 4 :] + said[: number % 4]
        history: list[Any] = []
        for word in words:
            answer = say(agent, *history, word)
            history += [word, answer.choices[0].message.model_dump()]
        return [message["content"] for message in history[1::2]]

    with ThreadPoolExecutor(8) as threads:
        played = list(threads.map(play, range(8)))
    wanted = {"hello": "Hi", "count": "1 2 3 4 5 6", "drift": "abc", "3": "It is 3"}
    for number, answers in enumerate(played):
        assert answers == [wanted[word] for word in said[number % 4 :] + said[: number % 4]]
        body = http("GET", f"{server.url}/sessions/agent-{number}")
        assert (body["answers"], body["started"], body["extended"], body["in_flight"]) == (4, 1, 3, 0)
        [sample] = read_session(body)
        written = TOKENIZER.decode(sample.token_ids[sample.loss_mask].tolist())
        assert written == "".join(f"{answer}<|im_end|>" for answer in answers)
    listed = http("GET", f"{server.url}/sessions")["sessions"]
    assert sorted(one["id"] for one in listed) == [f"agent-{number}" for number in range(8)]


def test_a_session_is_named_by_path_header_or_user(server: GatewayServer) -> None:
    plain = client_of(server, None)
    say(plain, "hello", extra_headers={"X-Session-Id": "by-header"})
    say(plain, "hello", user="by-user")
    assert {one["id"] for one in http("GET", f"{server.url}/sessions")["sessions"]} == {"by-header", "by-user"}
    with pytest.raises(openai.BadRequestError, match="name a session") as error:
        say(plain, "hello")
    assert error.value.code == "session_missing"
    with pytest.raises(openai.BadRequestError, match="a session's name must have"):
        say(plain, "hello", user="no spaces")


def test_delete_frees_and_what_is_gone_is_not_found(server: GatewayServer, client: Client) -> None:
    say(client("gone"), "hello")
    assert http("DELETE", f"{server.url}/sessions/gone")["answers"] == 1
    assert http("GET", f"{server.url}/sessions") == {
        "sessions": [], "bytes": 0, "max_bytes": 4 << 30, "evicted": 0,
    }  # fmt: skip
    status, error = refused("GET", f"{server.url}/sessions/gone")
    assert (status, error["code"]) == (404, "session_not_found")


def test_deleting_a_session_ends_its_requests(server: GatewayServer, client: Client, engine: Engine) -> None:
    engine.pause()  # nothing ends by itself
    try:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(say, client("busy"), "hello")
            wait_until(lambda: any(one["in_flight"] for one in http("GET", f"{server.url}/sessions")["sessions"]))
            http("DELETE", f"{server.url}/sessions/busy")
            with pytest.raises(openai.ConflictError, match="was deleted"):
                asked.result()
    finally:
        engine.resume()


def test_an_agent_that_leaves_stops_the_engine(server: GatewayServer, engine: Engine) -> None:
    engine.pause()
    try:
        with pytest.raises(openai.APITimeoutError):
            say(client_of(server, "left", timeout=0.5), "hello")
        wait_until(lambda: not sessions(server))
        assert refused("GET", f"{server.url}/sessions/left")[0] == 404  # nothing was sampled
    finally:
        engine.resume()


def wait_until(met: Callable[[], bool]) -> None:
    for _ in range(600):
        if met():
            return
        threading.Event().wait(0.1)
    raise AssertionError("it never happened")


# -- replies ----------------------------------------------------------------------------------------


def test_a_stream_says_the_same_as_a_reply(client: Client, server: GatewayServer) -> None:
    whole = say(client("whole"), "count", logprobs=True)
    chunks = list(say(client("stream"), "count", logprobs=True, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "stop"
    [logprobs] = [one.choices[0].logprobs for one in chunks if one.choices and one.choices[0].logprobs]
    assert logprobs.content == whole.choices[0].logprobs.content
    [sample] = read_session(http("GET", f"{server.url}/sessions/stream"))
    assert [one.logprob for one in logprobs.content] == sample.logprobs[sample.loss_mask].tolist()
    pieces = list(client("text").completions.create(model="any", prompt="ab", max_tokens=3, stream=True))
    assert [piece.choices[0].finish_reason for piece in pieces] == ["length"]


def test_a_stream_shows_that_it_waits_and_how_it_failed(
    client: Client, server: GatewayServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_replay.gateway.server.HEARTBEAT", 0.05)
    engine.pause()
    try:
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
        url = f"{server.url}/sessions/waits/v1/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as stream:
            assert stream.readline() == b": waiting for the engine\n"
            http("DELETE", f"{server.url}/sessions/waits")
            assert json.loads(stream.read().rpartition(b"data: ")[2])["error"]["code"] == "session_deleted"
        chunks = say(client("fails"), "hello", stream=True)
        http("DELETE", f"{server.url}/sessions/fails")
        with pytest.raises(openai.APIError, match="was deleted"):
            list(chunks)
    finally:
        engine.resume()


def test_a_call_of_a_tool_is_read_and_answered(client: Client) -> None:
    agent = client("tools")
    first = say(agent, "call", tools=[ADD])
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    [call] = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    second = say(agent, "call", first.choices[0].message.model_dump(), result, tools=[ADD])
    assert second.choices[0].message.content == "It is 3"
    chunks = list(say(client("stream"), "call", tools=[ADD], stream=True))
    [streamed] = [one.choices[0].delta.tool_calls[0] for one in chunks if one.choices[0].delta.tool_calls]
    assert streamed.index == 0
    assert streamed.function.model_dump() == call.function.model_dump()
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_what_is_no_call_stays_text(client: Client, server: GatewayServer) -> None:
    broken = say(client("broken"), "broken", tools=[ADD]).choices[0]
    assert (broken.finish_reason, broken.message.tool_calls) == ("stop", None)
    assert broken.message.content == '<tool_call>{"name": </tool_call>'
    assert http("GET", f"{server.url}/sessions/broken")["malformed_calls"] == 1
    untold = say(client("untold"), "call").choices[0]  # nobody offered a tool
    assert untold.message.tool_calls is None
    assert untold.message.content.startswith("<tool_call>")
    assert say(client("none"), "call", tools=[ADD], tool_choice="none").choices[0].message.tool_calls is None


def test_no_reply_has_routes_or_token_ids(server: GatewayServer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "temperature": 0}
    reply = http("POST", f"{server.url}/sessions/raw/v1/chat/completions", body)
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(reply["choices"][0]) == {"index", "finish_reason", "logprobs", "message"}
    assert http("GET", f"{server.url}/sessions/raw/v1/models")["data"][0]["id"] == reply["model"]


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"extra_body": {"top_k": 5, "mystery": 1}}, "mystery", "does not have the fields mystery, top_k"),
        ({"temperature": -1}, "temperature", r"must lie in \[0, 100\]"),
        ({"top_p": 0}, "top_p", r"must lie in \(0, 1\]"),
        ({"n": 0}, "n", r"n must lie in \[1, 128\]"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must lie in"),
        ({"stop": [""]}, "stop", "texts that are not empty"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "Expected `float"),
        ({"frequency_penalty": 1.0}, "frequency_penalty", "frequency_penalty = 1.0 is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "is not supported"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "cannot be made to call"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\] must be"),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            "chat_template_kwargs",
            "must not have tokenize",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(client: Client, fields: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        say(client("wrong"), "hello", **fields)
    assert (error.value.param, error.value.type) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "judge", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
    ],
)
def test_a_wrong_message_is_refused(client: Client, message: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\]"):
        say(client("wrong"), "hello", message)


def test_a_text_that_is_not_unicode_is_refused(server: GatewayServer) -> None:
    body = {"messages": [{"role": "user", "content": "\ud800"}]}
    status, error = refused("POST", f"{server.url}/sessions/wrong/v1/chat/completions", body)
    assert status == 400
    assert "not valid Unicode" in error["message"]


@pytest.mark.parametrize(
    "settings",
    [{"max_length": 1}, {"max_tokens": -1}, {"max_bytes": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"max_turns": 0}],
)
def test_a_setting_of_the_gateway_that_cannot_work_is_refused(engine: Engine, settings: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=next(iter(settings))):
        Gateway(engine, TOKENIZER, **{"max_length": 64, **settings})


@pytest.mark.parametrize("body", ["[]", "{", {"trajectories": [{}]}, {"trajectories": [{"routes": "!"}]}])
def test_what_is_no_session_is_not_read(body: Any) -> None:
    with pytest.raises(WireError, match="not the answer of GET /sessions/NAME"):
        read_session(body)


def test_neutral_values_and_parts_of_text_are_taken(client: Client) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    answer = say(client("neutral"), parts, frequency_penalty=0, response_format={"type": "text"}, top_logprobs=0)
    assert answer.choices[0].message.content == "Hi"


def test_limits_of_length_and_turns(make_gateway: Make) -> None:
    server = make_gateway(max_length=60, max_turns=2)
    agent = client_of(server, "short")
    cut = say(agent, "anything", max_tokens=500)
    assert cut.choices[0].finish_reason in ("length", "stop")
    assert cut.usage.total_tokens <= 60
    with pytest.raises(openai.BadRequestError, match="at most 59, are possible") as error:
        say(agent, "a long text that does not fit into the limit of sixty tokens")
    assert error.value.code == "context_length_exceeded"
    say(agent, "hello")
    with pytest.raises(openai.BadRequestError, match="has had its 2 turns"):
        say(agent, "hello")


def test_a_full_gateway_lets_read_sessions_go_and_refuses_before_it_loses_one(
    make_gateway: Make, engine: Engine
) -> None:
    need = (40 + 64) * bytes_per_token(engine.spec) + 6 * TURN_BYTES  # of a prompt and an answer to it
    server = make_gateway(max_bytes=3 * need)
    number = 0
    with pytest.raises(openai.RateLimitError, match="the gateway is full") as error:  # noqa: PT012
        while True:
            say(client_of(server, f"unread-{number}"), "hello")
            number += 1
    assert error.value.code == "memory_full"
    kept = [one["id"] for one in sessions(server)]
    assert kept == [f"unread-{one}" for one in range(number)]  # the refused one left nothing behind
    assert number >= 2
    for name in kept:
        http("GET", f"{server.url}/sessions/{name}")
    say(client_of(server, "new"), "hello")
    listing = http("GET", f"{server.url}/sessions")
    assert listing["evicted"] >= 1
    left = [one["id"] for one in listing["sessions"]]
    assert left == [*kept[listing["evicted"] :], "new"]  # the least recently used went first
    assert listing["bytes"] <= listing["max_bytes"]


# -- keys -------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_a_session_has_its_own(make_gateway: Make) -> None:
    server = make_gateway(api_key="the-key")
    with pytest.raises(openai.AuthenticationError, match="requires its key"):
        say(client_of(server, "one", api_key="another"), "hello")
    assert refused("GET", f"{server.url}/sessions")[0] == 401
    mine = {"Authorization": "Bearer the-key"}
    opened = http("POST", f"{server.url}/sessions", {"id": "one"}, **mine)
    agent = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0)
    assert say(agent, "hello").choices[0].message.content == "Hi"
    own = {"Authorization": f"Bearer {opened['api_key']}"}
    for method, path in (("GET", "sessions/one"), ("DELETE", "sessions/one"), ("GET", "sessions")):
        assert refused(method, f"{server.url}/{path}", **own)[0] == 401
    other = http("POST", f"{server.url}/sessions", **mine)
    assert other["id"].startswith("session-")
    with pytest.raises(openai.AuthenticationError):
        say(client_of(server, other["id"], api_key=opened["api_key"]), "hello")
    assert refused("POST", f"{server.url}/sessions", {"id": "one"}, **mine)[0] == 409
    assert http("GET", f"{server.url}/sessions/one", **mine)["answers"] == 1


def test_without_a_key_only_loopback_and_no_web_page(server: GatewayServer, engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"--host 0\.0\.0\.0 needs a key"):
        GatewayServer(Gateway(engine, TOKENIZER, max_length=64), "0.0.0.0")
    assert refused("GET", f"{server.url}/sessions", Origin="http://evil.example")[0] == 403


def test_other_paths_and_bodies_are_refused_in_the_same_form(server: GatewayServer) -> None:
    assert refused("GET", f"{server.url}/v2/nothing")[0] == 404
    request = urllib.request.Request(f"{server.url}/sessions/one/v1/completions", b"{", method="POST")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert json.loads(error.value.read())["error"]["message"].startswith("the body is not JSON")
    assert "prompt must be one text" in refused("POST", f"{server.url}/sessions/one/v1/completions", {})[1]["message"]


# -- weights ----------------------------------------------------------------------------------------


def test_an_answer_goes_on_over_new_weights_and_says_which_sampled_it(
    server: GatewayServer, client: Client, engine: Engine, talker: Any
) -> None:
    for version in range(1, 30):  # again where the machine was too slow or too fast
        name = f"swap-{version}"
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(say, client(name), "anything", temperature=1.0, max_tokens=300)
            wait_until(lambda asked=asked: asked.done() or any(one["in_flight"] for one in sessions(server)))
            http("POST", f"{server.url}/weights", {"folder": str(talker), "version": version})
            asked.result()
        [sample] = read_session(http("GET", f"{server.url}/sessions/{name}"))
        assert sample.first_missing_loss_row() is None
        versions = sample.versions[sample.loss_mask].tolist()
        assert versions == sorted(versions)
        if len(set(versions)) == 2:
            assert set(versions) == {version - 1, version}
            return
    raise AssertionError("no answer was interrupted")


def sessions(server: GatewayServer) -> list[dict[str, Any]]:
    return http("GET", f"{server.url}/sessions")["sessions"]
