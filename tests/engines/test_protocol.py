"""What every engine does alike with requests in flight: behind a fake server, where each moment can be chosen.

The same three promises are in test_contract.py, on real engines.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router_replay.engines import Completion, Engine, Request, Sampling, remote
from router_replay.errors import EngineError
from tests.engines.fake_server import CONNECT, FIRST_TOKEN, HOSTILE, FakeServer, fake_engine
from tests.engines.stub import Reply, eventually

PROMPT = (5, 6, 7, 8)
FOUR = Sampling(max_tokens=4)


@pytest.fixture(params=sorted(CONNECT))
def fake(request: pytest.FixtureRequest) -> Iterator[tuple[FakeServer, Engine]]:
    with fake_engine(request.param) as found:
        yield found


@pytest.fixture
def server(fake: tuple[FakeServer, Engine]) -> FakeServer:
    return fake[0]


@pytest.fixture
def engine(fake: tuple[FakeServer, Engine]) -> Engine:
    return fake[1]


def in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def submitted(engine: Engine, request: Request) -> concurrent.futures.Future[list[Completion]]:
    future = in_thread(lambda: engine.generate([request]))
    eventually(lambda: future.done() or any(flight.request.id == request.id for flight in engine._flights))  # type: ignore[attr-defined]
    return future


def running(engine: Engine, server: FakeServer, request: Request) -> concurrent.futures.Future[list[Completion]]:
    before = len(server.jobs)
    future = submitted(engine, request)
    eventually(lambda: len(server.jobs) == before + request.sampling.n)
    return future


def test_requests_end_with_the_versions_that_sampled_their_tokens(engine: Engine, server: FakeServer) -> None:
    flying = running(engine, server, Request(PROMPT, FOUR))
    server.finish()
    [completion] = flying.result(120)
    assert (completion.token_ids - FIRST_TOKEN).tolist() == completion.versions.tolist() == [0] * 4


def test_an_abort_of_an_unknown_id_gives_nothing(engine: Engine, server: FakeServer) -> None:
    assert engine.abort(["nobody"]) == []
    flying = running(engine, server, Request(PROMPT, FOUR))
    assert engine.abort(["nobody"]) == []
    assert not flying.done()
    server.finish()
    assert flying.result(120)[0].finish_reason == "length"


def test_a_request_that_was_submitted_while_paused_is_aborted_by_an_update(engine: Engine, server: FakeServer) -> None:
    engine.pause()
    flying = submitted(engine, Request(PROMPT, FOUR))
    engine.update_weights("/weights/1", 1, "abort")
    [completion] = flying.result(120)
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 0)
    later = submitted(engine, Request(PROMPT, FOUR))
    engine.resume()
    server.run_freely()
    assert set(later.result(120)[0].versions) == {1}


@pytest.mark.parametrize("bad", [Request(()), Request((5, 6), start=2), Request(PROMPT, id="twin"), "text"])
def test_one_bad_request_refuses_the_batch_before_any_is_sent(engine: Engine, server: FakeServer, bad: Any) -> None:
    asked = len(server.stub.asked)
    with pytest.raises(EngineError):
        engine.generate([Request(PROMPT, FOUR, id="twin"), bad])
    assert len(server.stub.asked) == asked


@pytest.mark.parametrize("in_flight", ["abort", "wait"])
def test_a_pause_settles_what_came_before_and_holds_what_comes_after(
    engine: Engine, server: FakeServer, in_flight: Any
) -> None:
    flying = running(engine, server, Request(PROMPT, FOUR))
    pausing = in_thread(lambda: engine.pause(in_flight))
    if in_flight == "wait":
        eventually(lambda: not engine._open)  # type: ignore[attr-defined]
        assert not pausing.done()
        server.finish()
    pausing.result(120)
    assert flying.result(120)[0].finish_reason == ("abort" if in_flight == "abort" else "length")
    later = submitted(engine, Request(PROMPT, FOUR))
    server.run_freely()
    assert not later.done()
    engine.resume()
    assert later.result(120)[0].finish_reason == "length"


def test_an_update_that_waits_lets_those_at_the_gate_of_another_finish_first(
    engine: Engine, server: FakeServer
) -> None:
    """The second update waits for a request that could not start because of the first."""
    flying = running(engine, server, Request(PROMPT, FOUR))
    first = in_thread(lambda: engine.update_weights("/weights/1", 1, "wait"))
    eventually(lambda: not engine._open)  # type: ignore[attr-defined]
    between = submitted(engine, Request(PROMPT, FOUR))
    second = in_thread(lambda: engine.update_weights("/weights/2", 2, "wait"))
    eventually(lambda: engine._pending == 2)  # type: ignore[attr-defined]
    server.run_freely()
    for update in (first, second):
        update.result(120)
    assert set(flying.result(120)[0].versions) == {0}
    assert set(between.result(120)[0].versions) == {1}
    assert engine.version == 2


@pytest.mark.parametrize("way", sorted(HOSTILE))
def test_a_spoilt_answer_is_an_error_of_its_request_alone(engine: Engine, server: FakeServer, way: str) -> None:
    flying = running(engine, server, Request(PROMPT, FOUR))
    server.spoil = HOSTILE[way]
    with pytest.raises(EngineError):
        engine.generate([Request(PROMPT, FOUR)])
    server.finish()
    assert flying.result(120)[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["vllm_http", "sglang"])
def test_a_request_that_is_kept_says_where_the_weights_changed(kind: str) -> None:
    with fake_engine(kind) as (server, engine):
        flying = running(engine, server, Request(PROMPT, FOUR))
        engine.update_weights("/weights/3", 3, "keep")
        server.finish()
        [completion] = flying.result(120)
        assert completion.versions.tolist() == [0, 0, 3, 3]
        assert (completion.token_ids - FIRST_TOKEN).tolist() == [0, 0, 3, 3]
        assert completion.routes.versions.tolist() == [0] * 5 + [3, 3]


def test_an_update_of_vllm_does_not_wait_for_the_answers_of_those_that_it_aborts() -> None:
    """They end with the old version, and nothing starts before that."""
    with fake_engine("vllm_http") as (server, engine):
        flying = running(engine, server, Request(PROMPT, FOUR))
        server.silent = True
        engine.update_weights("/weights/1", 1, "abort")
        assert (engine.version, server.version) == (1, 1)
        later = submitted(engine, Request(PROMPT, FOUR))
        server.run_freely()
        assert server.paused
        assert not flying.done()
        assert len(server.jobs) == 1
        server.answer_aborted()
        [completion] = flying.result(120)
        assert (completion.finish_reason, set(completion.versions)) == ("abort", {0})
        assert set(completion.routes.versions) == {0}
        assert set(later.result(120)[0].versions) == {1}


def test_a_load_that_breaks_vllm_takes_nothing_from_the_requests_that_it_aborts() -> None:
    with fake_engine("vllm_http") as (server, engine):
        flying = running(engine, server, Request(PROMPT, FOUR))
        workers: Any = server.stub.answers["/collective_rpc"]
        server.stub.answers["/collective_rpc"] = lambda body: (
            Reply({"error": "out of memory"}, 500) if body["method"].endswith("update_weights") else workers(body)
        )
        with pytest.raises(EngineError, match="it is unknown which weights vLLM has"):
            engine.update_weights("/weights/1", 1, "abort")
        [completion] = flying.result(120)
        assert (completion.finish_reason, set(completion.versions)) == ("abort", {0})
        with pytest.raises(EngineError, match="it is unknown which weights vLLM has"):
            engine.generate([Request(PROMPT, FOUR)])


def test_vllm_that_does_not_go_on_after_an_update_takes_no_requests() -> None:
    """The caller of the update has gone on, so the next calls say it: their requests would wait for ever."""
    with fake_engine("vllm_http") as (server, engine):
        flying = running(engine, server, Request(PROMPT, FOUR))
        server.stub.answers["/resume"] = Reply({"error": "out of memory"}, 500)
        engine.update_weights("/weights/1", 1, "abort")
        assert flying.result(120)[0].finish_reason == "abort"
        with pytest.raises(EngineError, match="out of memory"):
            engine.generate([Request(PROMPT, FOUR)])
        with pytest.raises(EngineError, match="out of memory"):
            engine.ping()


def test_vllm_that_does_not_end_the_aborted_requests_takes_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with them and the new weights, and their rows would have the old version."""
    monkeypatch.setattr(remote, "ABORT_ROUNDS", 2)
    with fake_engine("vllm_http") as (server, engine):
        flying = running(engine, server, Request(PROMPT, FOUR))
        server.silent = True
        engine.update_weights("/weights/1", 1, "abort")
        with pytest.raises(EngineError, match="was asked 2 times to abort"):
            engine.generate([Request(PROMPT, FOUR)])
        with pytest.raises(EngineError, match="was asked 2 times to abort"):
            engine.ping()
        server.answer_aborted()
        with pytest.raises(EngineError, match="was asked 2 times to abort"):
            flying.result(120)
