"""The door of `router-replay serve`: nothing passes without the key, and without any key nothing from elsewhere."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from router_replay.cli import main
from router_replay.engines import Engine, Request
from router_replay.engines.vllm import guard as vllm_guard
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.errors import EngineError
from tests.engines.conftest import GREEDY, KEY, Checkpoints, Servers, one, prompt
from tests.verify.by_url import check_verdicts

HERE = ("127.0.0.1", 8000)


def passed(kind: str, key: str, monkeypatch: pytest.MonkeyPatch, server: Any = HERE, **headers: str) -> Any:
    """True where the request reached the app, or else what was sent instead."""
    monkeypatch.setenv(vllm_guard.KEY, key)
    reached, sent = [], []

    async def app(*_: Any) -> None:
        reached.append(True)

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": kind, "server": server, "headers": pairs, "method": "OPTIONS", "path": "/pause"}
    asyncio.run(vllm_guard.Guard(app)(scope, receive, send))
    return True if reached else sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer sécret",
     "Bearer secret secret"],
)  # fmt: skip
def test_without_the_key_nothing_passes(kind: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {} if value is None else {"authorization": value}
    first, *_ = passed(kind, "secret", monkeypatch, **headers)
    assert first.get("status") == 401 if kind == "http" else first["type"] == "websocket.close"


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("value", ["Bearer secret", "bearer secret", "Bearer  secret "])
def test_the_key_opens_it_from_anywhere(kind: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed(kind, "secret", monkeypatch, ("10.0.0.5", 8000), authorization=value) is True


def test_the_servers_own_start_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed("lifespan", "secret", monkeypatch) is True


@pytest.mark.parametrize(
    ("server", "open_"),
    [
        (HERE, True), (("::1", 1), True), (("::ffff:127.0.0.1", 1), True), (("/run/vllm.sock", None), True),
        (("10.0.0.5", 1), False), (("::", 1), False), (("fe80::1", 1), False), (("host", 1), False), (None, False),
    ],
)  # fmt: skip
def test_without_any_key_only_loopback_passes(server: Any, open_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM was told to listen elsewhere in a way that serve does not see, such as a config file."""
    result = passed("http", "", monkeypatch, server)
    assert (result is True) == open_
    assert open_ or result[0]["status"] == 403


def test_without_any_key_web_pages_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed("http", "", monkeypatch, origin="https://example.org")[0]["status"] == 403


# -- the real server ----------------------------------------------------------------------------------


def ask(url: str, method: str, key: str | None = None, **headers: str) -> tuple[int, bytes]:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = b"{}" if method in ("POST", "PUT", "PATCH") else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_every_route_of_the_real_server_asks_for_the_key(vllm_http_engine: Engine, servers: Servers) -> None:
    url = servers.ours.url
    status, body = ask(f"{url}/openapi.json", "GET", KEY)
    assert status == 200
    routes = {
        (path, method.upper())
        for path, methods in json.loads(body)["paths"].items()
        for method in methods
        if method in ("get", "post", "put", "delete", "patch", "head", "options")
    }
    names = {path for path, _ in routes}
    assert {"/pause", "/resume", "/collective_rpc", "/update_weights", "/v1/completions", "/health"} <= names
    # Not in that list: mounted applications, the list itself, and what is nowhere.
    routes |= {(path, "GET") for path in ("/metrics", "/metrics/", "/docs", "/redoc", "/openapi.json", "/", "/nowhere")}
    routes |= {("/pause", "OPTIONS"), ("/v1/completions", "OPTIONS"), ("//pause", "POST"), ("/v1/../pause", "POST")}
    open_ = [(path, method) for path, method in sorted(routes) if ask(url + path, method)[0] != 401]
    assert open_ == []
    assert [ask(url + path, "POST", "wrong")[0] for path in ("/pause", "/collective_rpc")] == [401, 401]
    assert ask(f"{url}/health", "GET", KEY)[0] == 200


def test_verify_finds_the_checkpoint_of_a_server_with_the_plugin(
    vllm_http_engine: Engine,  # so that servers.ours is on checkpoint A
    servers: Servers,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", checkpoints.a, "--engine", servers.ours.url]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "answered 401" in printed.err
    assert "--api-key-env for router-replay verify" in printed.err
    monkeypatch.setenv("KEY_OF_THE_SERVER", KEY)
    named = ("--api-key-env", "KEY_OF_THE_SERVER")
    check_verdicts(capsys, servers.ours.url, checkpoints.a, checkpoints.b, *named)


def test_a_client_without_the_key_is_told_so_and_one_with_it_does_everything(
    vllm_http_engine: Engine, servers: Servers, checkpoints: Checkpoints
) -> None:
    for key in (None, "wrong"):
        with pytest.raises(EngineError, match=r"answered 401.*Pass the server's key as api_key="):
            VllmHttpEngine(servers.ours.url, api_key=key)
    before = one(vllm_http_engine, Request(prompt(), GREEDY))
    assert vllm_http_engine.vocabulary == 128
    vllm_http_engine.pause()
    vllm_http_engine.resume()
    vllm_http_engine.update_weights(checkpoints.a, vllm_http_engine.version)
    assert one(vllm_http_engine, Request(prompt(), GREEDY)).token_ids.tolist() == before.token_ids.tolist()


def test_a_real_server_without_a_key_answers_programs_here_and_no_web_page(
    vllm_http_engine: Engine, servers: Servers
) -> None:
    servers.plain.wait(lambda: VllmHttpEngine(servers.plain.url, spec=vllm_http_engine.spec)).close()
    assert ask(f"{servers.plain.url}/health", "GET")[0] == 200
    assert ask(f"{servers.plain.url}/pause", "POST", Origin="https://example.org")[0] == 403
