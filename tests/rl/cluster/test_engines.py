"""Engines in Ray actors: the protocol of an engine, and what a kill -9 of one of them leaves. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

import ray
from transformers import AutoModelForCausalLM

from router_replay.engines import EmbeddedEngine, EnginePool, Request, Sampling
from router_replay.errors import EngineError
from router_replay.replay import RouterReplay
from router_replay.rl.cluster.driver import Cluster, _connected
from router_replay.rl.cluster.engines import RayEngine
from router_replay.rl.cluster.folders import Received, fetch, send
from router_replay.rl.config import load_config
from router_replay.rl.engine_set import EngineSet

LONG = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
PROMPTS = [tuple(range(3, 9 + number)) for number in range(6)]


@pytest.fixture(scope="module")
def engines(random_model: pathlib.Path) -> Iterator[tuple[EnginePool, Callable[[float, int], None]]]:
    """Two engines in actors as a pool, and a function that pushes the weights times a factor as a version."""
    tables = "engines=[{dtype = 'float32', count = 2}]"
    config = load_config(None, [f"model.path={random_model}", tables, "cluster.kind=ray"])
    model = AutoModelForCausalLM.from_pretrained(random_model)
    replayer = RouterReplay(model)
    with contextlib.ExitStack() as closing:
        closing.enter_context(_connected(config))
        closing.enter_context(Cluster(config))
        several = EngineSet(config, model, replayer.router_names)
        closing.callback(several.close)
        pool = closing.enter_context(several.start(model.state_dict(), replayer.spec, version=0))
        assert isinstance(pool, EnginePool)

        def push(factor: float, version: int) -> None:
            several.push(pool, {name: tensor * factor for name, tensor in model.state_dict().items()}, version)

        yield pool, push


def engine_of(pool: EnginePool, name: str) -> Any:
    return next(member.engine for member in pool._members if member.name == name)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def in_background(pool: EnginePool, results: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.extend(pool.generate([Request(ids, LONG) for ids in PROMPTS])))
    thread.start()
    until(lambda: all(facts["running"] for facts in pool.report().values()))
    return thread


def test_the_answers_are_those_of_the_engine_itself(
    engines: tuple[EnginePool, Callable[[float, int], None]], random_model: pathlib.Path
) -> None:
    pool, push = engines
    push(0.9, 1)
    assert {type(member.engine) for member in pool._members} == {RayEngine}
    assert len({engine_of(pool, name).pid for name in ("engine0", "engine1")} | {os.getpid()}) == 3
    request = Request(PROMPTS[0], Sampling(max_tokens=8, temperature=0.0))
    model = AutoModelForCausalLM.from_pretrained(random_model)
    state = {name: tensor * 0.9 for name, tensor in model.state_dict().items()}
    with EmbeddedEngine(random_model, max_length=512) as alone:
        alone.update_weights(state, 1)
        [expected] = alone.generate([request])
    for name in ("engine0", "engine1"):
        [got] = engine_of(pool, name).generate([request])
        assert np.array_equal(got.token_ids, expected.token_ids)
        assert np.abs(got.logprobs - expected.logprobs).max() < 1e-5  # another number of threads, other rounding
        assert got.routes.same_sets(expected.routes)
        assert got.versions.tolist() == [1] * len(got.token_ids)


def test_errors_of_the_engine_arrive_as_they_are(engines: tuple[EnginePool, Callable[[float, int], None]]) -> None:
    engine = engine_of(engines[0], "engine0")
    with pytest.raises(EngineError, match="the prompt has 512 tokens, expected at most 511"):
        engine.generate([Request((3,) * 512)])
    with pytest.raises(EngineError, match=r"no \.safetensors file in /not/here"):
        engine.update_weights("/not/here", 7)
    with pytest.raises(EngineError, match="takes a folder of weights, got dict"):
        engine.update_weights({}, 7)
    with pytest.raises(EngineError, match="engine7 has no actor in this Ray cluster"):
        RayEngine("engine7", load_config(None), pathlib.Path(), engine.spec, 0)
    assert engine.version < 7


def test_requests_are_aborted_held_and_cancelled(engines: tuple[EnginePool, Callable[[float, int], None]]) -> None:
    pool, _ = engines
    results: list[Any] = []
    thread = in_background(pool, results)
    pool.pause("keep")
    pool.abort()
    thread.join(60)
    assert [completion.finish_reason for completion in results] == ["abort"] * len(PROMPTS)
    pool.resume()

    async def give_up() -> None:
        task = asyncio.ensure_future(engine_of(pool, "engine0").submit(Request(PROMPTS[0], LONG, id="gone")))
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    until(lambda: engine_of(pool, "engine0").abort(["gone"]) == [])
    assert len(pool.generate([Request(PROMPTS[0], Sampling(max_tokens=2, ignore_eos=True))])) == 1


def test_a_kill_in_the_middle_loses_no_request_and_the_engine_returns(
    engines: tuple[EnginePool, Callable[[float, int], None]],
) -> None:
    pool, push = engines
    expected = pool.generate([Request(ids, LONG) for ids in PROMPTS])
    results: list[Any] = []
    thread = in_background(pool, results)
    before = engine_of(pool, "engine0").pid
    os.kill(before, signal.SIGKILL)
    thread.join(120)
    assert [completion.finish_reason for completion in results] == ["length"] * len(PROMPTS)
    for got, wanted in zip(results, expected, strict=True):
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
    push(1.1, 2)  # while it is away, or just back
    until(lambda: not any(facts["lost"] for facts in pool.report().values()))
    assert engine_of(pool, "engine0").pid != before
    assert {facts["version"] for facts in pool.report().values()} == {2}
    [one, other] = [engine_of(pool, name).generate([Request(PROMPTS[0], LONG)])[0] for name in ("engine0", "engine1")]
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.versions.tolist() == [2] * 300


def test_a_folder_reaches_an_actor_that_cannot_read_it(
    engines: tuple[EnginePool, Callable[[float, int], None]], random_model: pathlib.Path
) -> None:
    """Through the object store, as on another machine; each file is put there once."""
    here = ray.get_runtime_context().get_node_id()
    assert send(str(random_model), here).files is None
    sent = send(str(random_model), "another node")
    assert sent.files is not None
    assert send(str(random_model), "a third node").files == sent.files
    received = Received()
    copy = received.open(sent, asyncio.run(fetch(sent)))
    assert copy != random_model
    for path in random_model.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()
    received.close()
    assert not copy.exists()
