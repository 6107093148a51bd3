"""vLLM's own ways of computing a prefix, each against the same prefix computed plainly."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from typing import Any

import numpy as np
import psutil
import pytest

from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.vllm.inprocess import _capabilities
from router_replay.errors import EngineError
from tests.engines.conftest import GREEDY, KEY, SHAPE, Servers, one, prompt, same
from tests.makers import random_routes


def test_prefix_cache_hits_return_the_rows_of_the_first_time(vllm_engine: Engine) -> None:
    tokens = prompt(31, 130)
    cold = one(vllm_engine, Request(tokens, GREEDY))
    warm = one(vllm_engine, Request(tokens, GREEDY))
    assert same(cold, warm)
    longer = one(vllm_engine, Request((*tokens, 9, 8, 7), GREEDY))
    assert longer.routes[:128].same_sets(cold.routes[:128])


def test_forced_rows_and_free_rows_of_one_prompt_do_not_share_a_cache(vllm_engine: Engine) -> None:
    tokens = prompt(32, 130)
    rows = random_routes(130, vllm_engine.spec, seed=3)
    free = one(vllm_engine, Request(tokens, GREEDY))
    forced = one(vllm_engine, Request(tokens, GREEDY, forced_routes=rows))
    again = one(vllm_engine, Request(tokens, GREEDY, forced_routes=rows))
    assert not np.array_equal(forced.logprobs, free.logprobs)
    assert same(forced, again)
    assert same(one(vllm_engine, Request(tokens, GREEDY)), free)


def test_chunked_prefill_takes_each_chunks_rows(vllm_engine: Engine) -> None:
    """Prompts of up to 200 tokens in chunks of 64, several at once, forced and free in one step."""
    requests = []
    for seed in range(4):
        rows = random_routes(150, vllm_engine.spec, seed=seed) if seed % 2 else None
        requests.append(Request(prompt(40 + seed, 170 + 10 * seed), Sampling(5, 0.0), forced_routes=rows))
    for request, completion in zip(requests, vllm_engine.generate(requests), strict=True):
        if request.forced_routes is not None:
            assert completion.routes[:150].same_sets(request.forced_routes)


def test_a_preempted_request_gets_its_rows_again(vllm_http_engine: Engine, servers: Servers) -> None:
    """24 blocks of 32 hold 768 tokens; eight requests of 70 + 110 need 1440."""
    before, forced = preemptions(servers.ours.url), vllm_http_engine.report()["forced_rows"]
    requests = [
        Request(
            prompt(50 + seed),
            Sampling(110, 0.0, ignore_eos=True),
            forced_routes=random_routes(70, vllm_http_engine.spec, seed=seed),
        )
        for seed in range(8)
    ]
    crowded = vllm_http_engine.generate(requests)
    assert preemptions(servers.ours.url) > before
    assert vllm_http_engine.report()["forced_rows"] > forced + 8 * 70  # those of the preempted once more
    for request, completion in zip(requests, crowded, strict=True):
        assert request.forced_routes is not None
        assert completion.routes[:70].same_sets(request.forced_routes)
        alone = one(vllm_http_engine, request)
        same_tokens = (alone.token_ids == completion.token_ids).mean()
        assert same_tokens > 0.9  # greedy, up to a near tie that another batch rounds the other way


def preemptions(url: str) -> float:
    metrics = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(metrics, timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


def test_ctrl_c_in_the_terminal_is_left_to_who_started_the_engine(vllm_engine: Engine) -> None:
    """A terminal sends it to all processes; the trainer decides when the engine ends."""
    manager = vllm_engine._connected.transport._engine.engine_core.resources.engine_manager  # type: ignore[attr-defined]
    before = one(vllm_engine, Request(prompt(), GREEDY))
    for core in manager.processes:
        for process in [psutil.Process(core.pid), *psutil.Process(core.pid).children(recursive=True)]:
            process.send_signal(signal.SIGINT)
    assert same(before, one(vllm_engine, Request(prompt(), GREEDY)))


def test_the_worker_says_what_it_did(vllm_engine: Engine) -> None:
    before = vllm_engine.report()
    one(vllm_engine, Request(prompt(60), GREEDY, forced_routes=random_routes(70, vllm_engine.spec)))
    after = vllm_engine.report()
    assert after["forced_rows"] - before["forced_rows"] == 70
    assert list(after["rules"].values()) == [3]  # three routed layers, one rule
    # Found by asking the router: vLLM applies this family's routed_scaling_factor of 1.5 behind it, not in it.
    assert "score='sigmoid', renormalize=True, scale=1.0" in next(iter(after["rules"]))


def test_both_ways_to_vllm_give_the_same(vllm_engine: Engine, vllm_http_engine: Engine) -> None:
    rows = random_routes(40, vllm_engine.spec)
    for forced in (None, rows):
        request = Request(prompt(61), GREEDY, start=7, forced_routes=forced)
        assert same(one(vllm_engine, request), one(vllm_http_engine, request))


def test_a_request_longer_than_the_model_is_an_error_and_the_engine_lives(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"256|maximum"):
        engine.generate([Request(prompt(0, SHAPE["max_model_len"] + 5))])
    assert len(one(engine, Request(prompt(), GREEDY)).token_ids) == 20


class WithoutPlugin:
    async def call_all(self, method: str) -> object:
        raise AttributeError(f"'Worker' object has no attribute {method!r}")


class WithMonolithicKernel:
    """On its second rank only."""

    async def call_all(self, method: str) -> object:
        able = {"captures": True, "forced_routes": True, "reason": ""}
        return [able, {"captures": True, "forced_routes": False, "reason": "a monolithic MoE kernel"}]


@pytest.mark.parametrize(
    ("transport", "message"),
    [(WithoutPlugin(), "plugin of Router Replay is not active"), (WithMonolithicKernel(), "a monolithic MoE kernel")],
)
def test_an_engine_without_forced_routing_is_refused_at_start(transport: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        asyncio.run(_capabilities(transport, forced_routes=True))
