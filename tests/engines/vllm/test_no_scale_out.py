"""A server with the plugin that was started by vLLM's own command, without --enable-scale-out.

From 0.30 on such a server has no route for token ids, so everything goes through /v1/completions. test_stock.py has
such a server without the plugin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.serve import MODULE, plugin_environment
from router_replay.engines.vllm.token_routes import GENERATE
from router_replay.engines.vllm.versions import installed_version, numbers_of
from tests.engines.conftest import (
    GREEDY,
    OWN_WORKER,
    PROMPT_TOKENS,
    Checkpoints,
    Server,
    one,
    prompt,
    same,
    start_command,
)
from tests.engines.vllm.record import ROUTE_MUST_BE_ASKED_FOR, refusal_of_generate, status_of
from tests.makers import random_routes


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if numbers_of(installed_version()) < ROUTE_MUST_BE_ASKED_FOR:
        pytest.skip("every server of this vLLM has the route for token ids")
    command = [sys.executable, "-m", MODULE, "--model", checkpoints.a, "--enable-return-routed-experts"]
    command += ["--logprobs-mode", "processed_logprobs"]
    variables = {**os.environ, **OWN_WORKER, **plugin_environment({}, installed_version())}
    server = start_command(command, tmp_path_factory.mktemp("no_scale_out") / "log", variables)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[Engine]:
    with server.wait(lambda: VllmHttpEngine(server.url), 600) as engine:
        assert status_of(server.url + GENERATE, {}) == refusal_of_generate(installed_version())
        yield engine


def test_the_plugin_is_used(engine: Engine) -> None:
    can = engine.capabilities
    assert (can.routes, can.start, can.forced_routes, can.versions, can.why_not) == (True,) * 4 + ("",)


def test_rows_are_forced_and_returned_as_in_process(engine: Engine, vllm_engine: Engine) -> None:
    for request in (
        Request(prompt(), GREEDY),
        Request(prompt(1), GREEDY, start=2, forced_routes=random_routes(40, engine.spec, seed=3)),
        Request(prompt(2), Sampling(20, seed=5, ignore_eos=True), start=PROMPT_TOKENS - 1),
    ):
        came = one(engine, request)
        assert same(came, one(vllm_engine, request))
        assert (came.start, len(came.routes)) == (request.start, PROMPT_TOKENS + 20 - 1 - request.start)
        if request.forced_routes is not None:
            assert came.routes[:38].same_sets(request.forced_routes[2:])


def test_new_weights_are_used_and_told(engine: Engine, vllm_fresh_b: Completion, checkpoints: Checkpoints) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    engine.update_weights(checkpoints.b, 1)
    after = one(engine, Request(prompt(), GREEDY))
    assert same(after, vllm_fresh_b)
    assert set(after.versions) == {1}
    engine.update_weights(checkpoints.a, 0)
    assert same(one(engine, Request(prompt(), GREEDY)), before)
