"""A vLLM that plays a script, and a client of it. Real engines are in the conftest above, for the contract too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router_replay.engines.vllm.client import Transport, VllmClient
from tests.engines.vllm.script import Script


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[VllmClient]:
    async def start() -> Transport:
        return script

    with VllmClient(start) as client:
        yield client
