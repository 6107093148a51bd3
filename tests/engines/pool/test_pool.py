"""A pool of engines: where requests go, what moves with them, and what happens when engines die and return."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from router_replay.engines import EmbeddedEngine, Engine, EnginePool, Request, Sampling
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.conftest import GREEDY, LONG, SHAPE, Checkpoints, one, prompt, same
from tests.makers import random_routes

FAST = {"health_seconds": 0.05, "patience": 5.0}


@pytest.fixture
def make(checkpoints: Checkpoints) -> Iterator[Callable[..., EnginePool]]:
    with contextlib.ExitStack() as closing:

        def pool(names: str = "ab", **settings: Any) -> EnginePool:
            engines: dict[str, Engine] = {name: embedded(checkpoints.a) for name in names}
            return closing.enter_context(EnginePool(engines, **{**FAST, **settings}))

        yield pool


def embedded(folder: str, version: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(folder, max_length=SHAPE["max_model_len"], version=version)


def engine_of(pool: EnginePool, name: str) -> Engine:
    return next(member.engine for member in pool._members if member.name == name)


def served(pool: EnginePool) -> dict[str, int]:
    return {name: facts["served"] for name, facts in pool.report().items()}


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_new_prompts_are_spread_and_conversations_stay(make: Callable[..., EnginePool]) -> None:
    pool = make()
    first = [one(pool, Request(prompt(seed), GREEDY)) for seed in range(4)]
    assert served(pool) == {"a": 2, "b": 2}
    for seed, completion in enumerate(first):
        before = served(pool)
        longer = (*prompt(seed), *completion.token_ids.tolist(), 5, 6)
        one(pool, Request(longer, GREEDY))
        [engine] = [name for name, count in served(pool).items() if count > before[name]]
        assert engine == "ab"[seed % 2]


def test_a_busy_engine_does_not_keep_its_conversations(make: Callable[..., EnginePool]) -> None:
    pool = make(slack=0)
    one(pool, Request(prompt(), GREEDY))
    assert served(pool) == {"a": 1, "b": 0}
    pool.generate([Request((*prompt(), token), GREEDY) for token in (3, 4)])
    assert served(pool) == {"a": 2, "b": 1}


def test_a_conversation_that_moves_keeps_its_routing(make: Callable[..., EnginePool]) -> None:
    pool = make()
    rows = random_routes(PROMPT := 60, pool.spec)
    tokens = prompt(1, PROMPT + 5)
    moved = one(pool, Request(tokens, GREEDY, known_routes=rows))  # no engine computed this prompt
    assert moved.routes[:PROMPT].same_sets(rows)
    assert same(moved, one(pool, Request(tokens, GREEDY, forced_routes=rows)))
    stayed = one(pool, Request(tokens, GREEDY, known_routes=rows))  # one did now
    assert not stayed.routes[:PROMPT].same_sets(rows)
    nothing = one(pool, Request(prompt(2), GREEDY, known_routes=Routes.missing(5, pool.spec)))
    assert len(nothing.token_ids) == 20


def test_known_routes_are_checked(make: Callable[..., EnginePool]) -> None:
    pool = make("a")
    other = RouterSpec(16, 2, (1, 2, 3))
    for known, words in (
        (random_routes(71, pool.spec), "71 known rows for a prompt of 70 tokens"),
        (random_routes(3, other), "known_routes are those of another model"),
        ("rows", "known_routes must be Routes"),
    ):
        with pytest.raises(EngineError, match=words):
            pool.generate([Request(prompt(), GREEDY, known_routes=known)])  # type: ignore[arg-type]


def test_requests_of_an_engine_that_dies_go_to_the_others(make: Callable[..., EnginePool]) -> None:
    pool = make()
    alone = one(pool, Request(prompt(), GREEDY))
    assert served(pool) == {"a": 1, "b": 0}

    async def play() -> list[Any]:
        tasks = [asyncio.create_task(pool.submit(Request(prompt(seed), LONG))) for seed in range(6)]
        await asyncio.to_thread(until, lambda: pool.report()["a"]["running"] == 3)
        await asyncio.to_thread(engine_of(pool, "a").close)
        return await asyncio.gather(*tasks)

    assert all(len(completion.token_ids) == 150 for [completion] in asyncio.run(play()))
    assert pool.report()["a"]["lost"]
    assert not pool.report()["b"]["lost"]
    assert same(one(pool, Request(prompt(), GREEDY)), alone)
    assert served(pool)["a"] <= 1


def test_an_engine_returns_with_the_current_weights(make: Callable[..., EnginePool], checkpoints: Checkpoints) -> None:
    allowed = threading.Event()

    def connect() -> Engine:
        if not allowed.is_set():
            raise EngineError("the server is not there yet")
        return embedded(checkpoints.a)

    pool = make(connect={"a": connect})
    engine_of(pool, "a").close()
    pool.update_weights(checkpoints.b, 7)
    assert pool.version == 7
    assert "not there yet" in pool.report()["a"]["lost"] or "closed" in pool.report()["a"]["lost"]
    allowed.set()
    until(lambda: not pool.report()["a"]["lost"])
    assert {facts["version"] for facts in pool.report().values()} == {7}
    answers = [one(engine_of(pool, name), Request(prompt(), GREEDY)) for name in "ab"]
    assert same(*answers)


def test_no_engine_returns_while_the_weights_that_it_would_load_are_overwritten(
    make: Callable[..., EnginePool], checkpoints: Checkpoints
) -> None:
    allowed, loaded = threading.Event(), list[int]()

    class Noting(EmbeddedEngine):
        def update_weights(self, source: Any, version: int, in_flight: Any = "abort") -> None:
            loaded.append(version)
            super().update_weights(source, version, in_flight)

    def connect() -> Engine:
        if not allowed.is_set():
            raise EngineError("the server is not there yet")
        return Noting(checkpoints.a, max_length=256)

    pool = make(connect={"a": connect})
    engine_of(pool, "a").close()
    pool.update_weights(checkpoints.b, 7)
    with pool.without_returns():
        allowed.set()
        time.sleep(1.0)  # many tests of the engines, each of which would bring it back
        assert loaded == []
        pool.update_weights(checkpoints.b, 8)
    until(lambda: not pool.report()["a"]["lost"])
    assert loaded == [8]


def test_an_engine_that_returns_to_a_held_pool_is_held(
    make: Callable[..., EnginePool], checkpoints: Checkpoints
) -> None:
    pool = make("a", connect={"a": lambda: embedded(checkpoints.a)})
    pool.pause()
    engine_of(pool, "a").close()
    until(lambda: bool(pool.report()["a"]["lost"]))
    until(lambda: not pool.report()["a"]["lost"])
    returned = engine_of(pool, "a")
    assert isinstance(returned, EmbeddedEngine)
    assert returned._schedule.paused

    async def play() -> Any:
        task = asyncio.create_task(pool.submit(Request(prompt(), GREEDY)))
        await asyncio.sleep(0.3)
        assert not task.done()
        await asyncio.to_thread(pool.resume)
        return await task

    [completion] = asyncio.run(play())
    assert len(completion.token_ids) == 20


def test_requests_of_a_silent_engine_are_taken_from_it(make: Callable[..., EnginePool]) -> None:
    pool = make()
    silent = engine_of(pool, "a")
    silent.pause()  # as a server that keeps its connections but computes nothing any more

    async def play() -> list[Any]:
        tasks = [asyncio.create_task(pool.submit(Request(prompt(seed), GREEDY))) for seed in range(2)]
        await asyncio.to_thread(until, lambda: pool.report()["a"]["running"] == 1)
        pool._set_aside(pool._members[0], "it does not answer")
        return await asyncio.gather(*tasks)

    assert len(asyncio.run(play())) == 2
    assert served(pool) == {"a": 0, "b": 2}


def test_a_caller_that_goes_away_takes_its_request_along(make: Callable[..., EnginePool]) -> None:
    pool = make("a")

    async def play() -> None:
        task = asyncio.create_task(pool.submit(Request(prompt(), LONG)))
        await asyncio.to_thread(until, lambda: pool.report()["a"]["running"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert pool.report()["a"]["running"] == 0
    assert pool._flights == {}


def test_an_error_of_an_engine_that_answers_is_the_callers(make: Callable[..., EnginePool]) -> None:
    pool = make()
    for bad in (Request((), GREEDY), Request((5, 600), GREEDY), Request(prompt(0, 300), GREEDY)):
        with pytest.raises(EngineError):
            pool.generate([bad])
    assert not any(facts["lost"] for facts in pool.report().values())


def test_without_an_engine_requests_wait_and_then_say_who_is_missing(make: Callable[..., EnginePool]) -> None:
    pool = make("ab", patience=0.4)
    for name in "ab":
        engine_of(pool, name).close()
    until(lambda: all(facts["lost"] for facts in pool.report().values()))
    with pytest.raises(EngineError, match=r"no engine of the pool answers, for 0.4 seconds: a: .*; b: "):
        pool.generate([Request(prompt(), GREEDY)])
    with pytest.raises(EngineError, match="no engine of the pool took version 3"):
        pool.update_weights("somewhere", 3)
    with pytest.raises(EngineError, match="no engine of the pool answers"):
        pool.ping()


def test_a_waiting_request_can_be_aborted(make: Callable[..., EnginePool]) -> None:
    pool = make("a")
    engine_of(pool, "a").close()
    until(lambda: bool(pool.report()["a"]["lost"]))

    async def play() -> Any:
        task = asyncio.create_task(pool.submit(Request(prompt(), Sampling(n=2), id="wanted")))
        await asyncio.to_thread(until, lambda: "wanted" in pool._flights)
        await asyncio.to_thread(pool.abort, ["wanted"])
        return await task

    assert [completion.finish_reason for completion in asyncio.run(play())] == ["abort", "abort"]


def test_weights_go_to_so_many_engines_at_once(make: Callable[..., EnginePool], checkpoints: Checkpoints) -> None:
    pool = make("abc", at_once=1)
    asked: list[str] = []
    updating: list[int] = []

    def source(name: str) -> str:
        asked.append(name)
        updating.append(sum(member.updating for member in pool._members))
        return checkpoints.b

    pool.update_weights(source, 4)
    assert sorted(asked) == ["a", "b", "c"]
    assert updating == [1, 1, 1]
    assert {facts["version"] for facts in pool.report().values()} == {pool.version} == {4}


def test_refused_weights_raise_and_name_the_engine(make: Callable[..., EnginePool], checkpoints: Checkpoints) -> None:
    pool = make()
    with pytest.raises(EngineError, match=r"b: .*nowhere"):
        pool.update_weights(lambda name: checkpoints.b if name == "a" else "/nowhere", 5)
    assert pool.version == 0
    assert not any(facts["lost"] for facts in pool.report().values())


def test_an_engine_that_returns_does_not_get_weights_that_were_refused(
    make: Callable[..., EnginePool], checkpoints: Checkpoints
) -> None:
    pool = make(connect={"a": lambda: embedded(checkpoints.a)})
    pool.update_weights(checkpoints.b, 1)
    with pytest.raises(EngineError, match="nowhere"):
        pool.update_weights("/nowhere", 2)
    engine_of(pool, "a").close()
    until(lambda: bool(pool.report()["a"]["lost"]))
    until(lambda: not pool.report()["a"]["lost"])
    assert {facts["version"] for facts in pool.report().values()} == {pool.version} == {1}


def test_rolling_updates_leave_versions_in_order(make: Callable[..., EnginePool], checkpoints: Checkpoints) -> None:
    """Requests that run while engines change their weights one after the other have versions that only grow."""
    pool = make(at_once=1)

    async def play() -> list[Any]:
        tasks = [asyncio.create_task(pool.submit(Request(prompt(seed), LONG))) for seed in range(6)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(pool.update_weights, checkpoints.b, 1, "keep")
        return await asyncio.gather(*tasks)

    for [completion] in asyncio.run(play()):
        assert set(completion.versions.tolist()) <= {0, 1}
        assert (np.diff(completion.versions) >= 0).all()
        assert np.array_equal(completion.routes.versions[69:], completion.versions)


def test_what_cannot_be_a_pool(checkpoints: Checkpoints) -> None:
    with pytest.raises(EngineError, match="at least one engine"):
        EnginePool({})
    with embedded(checkpoints.a) as a, embedded(checkpoints.a, version=3) as b:
        with pytest.raises(EngineError, match="the same version: a has 0, and b has 3"):
            EnginePool({"a": a, "b": b})
        with pytest.raises(EngineError, match="not in the pool: \\['c'\\]"):
            EnginePool({"a": a}, connect={"c": lambda: a})


def test_a_closed_pool_refuses_and_ends_what_waits(make: Callable[..., EnginePool]) -> None:
    pool = make("a")
    engine_of(pool, "a").close()
    until(lambda: bool(pool.report()["a"]["lost"]))

    async def play() -> None:
        task = asyncio.create_task(pool.submit(Request(prompt(), GREEDY)))
        await asyncio.to_thread(until, lambda: bool(pool._flights))
        await asyncio.to_thread(pool.close)
        with pytest.raises(EngineError, match="closed before"):
            await task

    asyncio.run(play())
    with pytest.raises(EngineError, match="closed"):
        pool.generate([Request(prompt(), GREEDY)])
