"""Aborts, pauses and weight updates while SGLang is at work on requests: who ends, who waits, who goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from router_replay.engines import Request, Sampling
from router_replay.engines.sglang import SglangEngine
from router_replay.errors import EngineError
from tests.engines.sglang.server import PROMPT, Background, answer, one, spans
from tests.engines.stub import Reply, Stub, eventually


def until_aborted(stub: Stub, tokens: int) -> None:
    """/generate answers when its name was aborted."""

    def generate(body: dict[str, Any]) -> Reply:
        eventually(lambda: {"rid": body["rid"]} in stub.bodies("/abort_request"))
        return answer(tokens, finish_reason={"type": "abort", "message": "Aborted"})

    stub.answers["/generate"] = generate


def test_abort_returns_the_partial_completion(engine: SglangEngine, stub: Stub) -> None:
    until_aborted(stub, 2)
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=99), id="mine"))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    assert engine.abort(["someone else's"]) == []
    [partial] = engine.abort(["mine"])
    flying.join()
    assert flying.landed == [partial]
    assert partial.finish_reason == "abort"
    assert len(partial.routes) == 4 + 2 - 1


def test_an_abort_out_of_the_queue_has_tokens_without_rows(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(2, finish_reason={"type": "abort"}, routed_experts=None)
    completion = one(engine)
    assert len(completion.routes) == 5
    assert not completion.routes.captured.any()


def test_requests_wait_while_paused(engine: SglangEngine, stub: Stub) -> None:
    engine.pause()
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    doomed = Background(engine, Request(PROMPT, Sampling(max_tokens=3), id="doomed"))
    eventually(lambda: len(engine._flights) == 2)
    assert not stub.bodies("/generate")
    [never] = engine.abort(["doomed"])
    assert (never.finish_reason, len(never.token_ids)) == ("abort", 0)
    engine.resume()
    flying.join()
    doomed.join()
    assert len(flying.landed) == 1
    assert len(stub.bodies("/generate")) == 1


def test_wait_lets_them_end_and_an_abort_ends_the_wait(engine: SglangEngine, stub: Stub) -> None:
    until_aborted(stub, 2)
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3), id="mine"))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    updating = threading.Thread(target=engine.update_weights, args=("/weights", 1, "wait"))
    updating.start()
    eventually(lambda: not engine._open)
    assert not stub.bodies("/update_weights_from_disk")
    assert [partial.finish_reason for partial in engine.abort(["mine"])] == ["abort"]
    updating.join(120)
    flying.join()
    assert engine.version == 1


def test_a_paused_engine_finishes_nothing(engine: SglangEngine, stub: Stub) -> None:
    until_aborted(stub, 2)
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    engine.pause("keep")
    with pytest.raises(EngineError, match="a paused engine finishes no request"):
        engine.update_weights("/weights", 1, "wait")
    # An abort needs the server to go on for a moment; it is held again afterwards, and the pause stands.
    engine.update_weights("/weights", 1, "abort")
    flying.join()
    control = [path for path, _ in stub.asked if path in ("/pause_generation", "/continue_generation")]
    assert control == ["/pause_generation", "/continue_generation", "/pause_generation"]
    assert not engine._open
    engine.resume()
    assert stub.asked[-1][0] == "/continue_generation"


def test_an_abort_does_not_wake_a_server_that_is_loading(engine: SglangEngine, stub: Stub) -> None:
    until_aborted(stub, 2)
    loaded = threading.Event()

    def load(body: dict[str, Any]) -> Reply:
        assert loaded.wait(120)
        return Reply({"success": True, "message": ""})

    stub.answers["/update_weights_from_disk"] = load
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    updating = threading.Thread(target=engine.update_weights, args=("/weights", 1, "keep"))
    updating.start()
    eventually(lambda: len(stub.bodies("/update_weights_from_disk")) == 1)
    aborting = threading.Thread(target=engine.abort)
    aborting.start()
    aborting.join(0.3)
    assert not stub.bodies("/continue_generation")
    loaded.set()
    for thread in (updating, aborting):
        thread.join(120)
    flying.join()
    assert flying.landed[0].finish_reason == "abort"


def test_keep_loads_without_a_flush(engine: SglangEngine, stub: Stub) -> None:
    """A held request's blocks cannot be flushed; the name of the version in the cache's keys keeps them apart."""
    loaded = threading.Event()

    def generate(body: dict[str, Any]) -> Reply:
        loaded.wait(120)
        return answer(weight_versions=spans(("default", 1), ("1", 3)))

    stub.answers["/generate"] = generate
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    engine.update_weights("/weights", version=1, in_flight="keep")
    loaded.set()
    flying.join()
    assert flying.error is None
    assert stub.bodies("/update_weights_from_disk")[0]["flush_cache"] is False
    assert flying.landed[0].versions.tolist() == [0, 1, 1]
