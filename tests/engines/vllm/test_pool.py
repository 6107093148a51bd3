"""A pool over real vLLM servers, one of which is killed in the middle of its requests and started again."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from router_replay.engines import Engine, EnginePool, Request
from router_replay.engines.vllm.http import VllmHttpEngine
from tests.engines.conftest import (
    GREEDY,
    KEY,
    LONG,
    Checkpoints,
    Server,
    Servers,
    one,
    prompt,
    same,
    start_server,
)
from tests.engines.stub import eventually


@pytest.fixture
def doomed(checkpoints: Checkpoints, tmp_path: pathlib.Path) -> Iterator[list[Server]]:
    """The servers that this test starts, the newest last."""
    started = [start_server(checkpoints.a, tmp_path / "first.log")]
    yield started
    for server in started:
        server.kill()


def test_a_killed_server_loses_no_request_and_returns_with_the_current_weights(
    servers: Servers,
    vllm_http_engine: Engine,  # so that servers.ours is on checkpoint A
    doomed: list[Server],
    checkpoints: Checkpoints,
    tmp_path: pathlib.Path,
) -> None:
    def connect() -> Engine:
        return VllmHttpEngine(doomed[-1].url)

    engines = {"a": doomed[0].wait(connect), "b": VllmHttpEngine(servers.ours.url, api_key=KEY)}
    with EnginePool(engines, connect={"a": connect}, health_seconds=0.5) as pool:
        assert pool.capabilities.forced_routes

        async def play() -> list[Any]:
            tasks = [asyncio.create_task(pool.submit(Request(prompt(seed), LONG))) for seed in range(6)]
            while not pool.report()["a"]["running"] == pool.report()["b"]["running"] == 3:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(doomed[0].kill)
            return await asyncio.gather(*tasks)

        completions = [completion for samples in asyncio.run(play()) for completion in samples]
        assert all(len(completion.token_ids) == 150 for completion in completions)
        assert all(completion.finish_reason == "length" for completion in completions)
        # By a request that failed, or by the regular test if all of them ended just before the kill.
        eventually(lambda: bool(pool.report()["a"]["lost"]))
        # The conversation of an engine that is gone goes on elsewhere, with the rows that it recorded.
        first = completions[0]
        tokens = (*prompt(0), *first.token_ids[:20].tolist())
        pool._prefixes.remember(tokens, "a")
        again = one(pool, Request(tokens, GREEDY, known_routes=first.routes[: len(tokens) - 1]))
        assert again.routes[: len(tokens) - 1].same_sets(first.routes[: len(tokens) - 1])

        pool.update_weights(checkpoints.b, 1)
        doomed.append(start_server(checkpoints.a, tmp_path / "second.log"))
        deadline = time.monotonic() + 600
        while pool.report()["a"]["lost"]:
            assert time.monotonic() < deadline, pool.report()
            time.sleep(0.5)
        assert {facts["version"] for facts in pool.report().values()} == {1}
        members = {member.name: member.engine for member in pool._members}
        assert same(*(one(members[name], Request(prompt(3), GREEDY)) for name in "ab"))
        pool.update_weights(checkpoints.a, 0)  # servers.ours serves other tests too
