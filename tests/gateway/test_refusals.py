"""What cannot be done is refused in OpenAI's form, by the name of the field; limits and keys hold."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from router_replay.engines import Engine
from router_replay.errors import EngineError, WireError
from router_replay.gateway import Gateway, GatewayServer, read_session
from router_replay.gateway.sessions import TURN_BYTES, bytes_per_token
from tests.gateway.conftest import client_of, http, refused, say, sessions
from tests.gateway.talker import ADD, make_tokenizer

Client = Callable[..., Any]
Make = Callable[..., GatewayServer]
TOKENIZER = make_tokenizer()


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
    with pytest.raises(openai.RateLimitError, match="the gateway is full") as error:  # noqa: PT012
        for number in range(20):
            say(client_of(server, f"unread-{number}"), "hello")
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
