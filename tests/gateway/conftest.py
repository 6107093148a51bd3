"""A gateway over the embedded engine and a model with dictated answers, for OpenAI's own client."""

from __future__ import annotations

import json
import pathlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from router_replay.engines import EmbeddedEngine, Engine
from router_replay.gateway import Gateway, GatewayServer
from tests.gateway.talker import dictate, make_tokenizer, save_talker


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("talker")
    save_talker(folder)
    return folder


@pytest.fixture(scope="session")
def engine(talker: pathlib.Path) -> Iterator[Engine]:
    import torch

    torch.set_num_threads(1)
    with EmbeddedEngine(talker, dtype="float32") as engine:
        dictate(engine, make_tokenizer())
        yield engine


@pytest.fixture
def make_gateway(engine: Engine) -> Iterator[Callable[..., GatewayServer]]:
    """A function that starts a gateway with these settings."""
    servers: list[GatewayServer] = []

    def make(api_key: str | None = None, **settings: Any) -> GatewayServer:
        gateway = Gateway(engine, make_tokenizer(), **{"max_length": 1024, "max_tokens": 64, **settings})
        servers.append(GatewayServer(gateway, api_key=api_key).start())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_gateway: Callable[..., GatewayServer]) -> GatewayServer:
    return make_gateway()


@pytest.fixture
def client(server: GatewayServer) -> Callable[..., Any]:
    """A function that makes OpenAI's client for a session."""
    return lambda name, **more: client_of(server, name, **more)


def client_of(server: GatewayServer, name: str | None, api_key: str = "none", **more: Any) -> Any:
    path = "/v1" if name is None else f"/sessions/{name}/v1"
    return openai.OpenAI(base_url=server.url + path, api_key=api_key, max_retries=0, **more)


def http(method: str, url: str, body: Any = None, **headers: str) -> Any:
    """The JSON of an answer; an HTTPError if it is refused."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def say(client: Any, *said: str | dict[str, Any], **more: Any) -> Any:
    """Ask with these messages, texts being those of the user."""
    messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in said]
    return client.chat.completions.create(model="any", messages=messages, **{"temperature": 0, **more})


def refused(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as error:
        http(method, url, body, **headers)
    return error.value.code, json.loads(error.value.read())["error"]


def sessions(server: GatewayServer) -> list[dict[str, Any]]:
    return http("GET", f"{server.url}/sessions")["sessions"]


def wait_until(met: Callable[[], bool]) -> None:
    for _ in range(600):
        if met():
            return
        time.sleep(0.1)
    raise AssertionError("it never happened")
