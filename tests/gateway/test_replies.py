"""OpenAI's own client reads the replies: whole, streamed, with tool calls, and without routes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from router_replay.engines import Engine
from router_replay.gateway import GatewayServer, read_session
from tests.gateway.conftest import http, say
from tests.gateway.talker import ADD

Client = Callable[..., Any]


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
