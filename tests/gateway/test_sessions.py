"""Sessions: named in three ways, side by side, freed, given up, and over new weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from router_replay.engines import Engine, Request
from router_replay.gateway import GatewayServer, read_session
from tests.gateway.conftest import client_of, http, refused, say, sessions, wait_until
from tests.gateway.talker import make_tokenizer

Client = Callable[..., Any]
TOKENIZER = make_tokenizer()


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


def test_an_answer_goes_on_over_new_weights_with_its_experts_forced(
    server: GatewayServer, client: Client, engine: Engine, talker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, requests = engine.submit, list[Request]()

    async def noted(request: Request) -> Any:
        requests.append(request)
        return await submit(request)

    monkeypatch.setattr(engine, "submit", noted)
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
            forced = requests[-1].forced_routes
            assert forced is not None
            assert sample.routes is not None
            assert len(forced) == len(requests[-1].token_ids) - 1
            assert forced.same_sets(sample.routes[: len(forced)])
            return
    raise AssertionError("no answer was interrupted")
