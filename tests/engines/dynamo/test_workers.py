"""Aborts, pauses and weights: what the workers are told, and what is made of their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.engines.dynamo import DynamoEngine
from router_replay.errors import EngineError
from tests.engines.dynamo.server import COMPLETIONS, GENERATE, OK, PROMPT, SPEC, Plugin, answer, generated, one
from tests.engines.stub import Reply, Stub, eventually


def in_flight(
    engine: Engine, request: Request, running: Callable[[], bool]
) -> tuple[threading.Thread, list[Completion]]:
    landed: list[Completion] = []
    thread = threading.Thread(target=lambda: landed.extend(engine.generate([request])))
    thread.start()
    eventually(running)
    return thread, landed


def test_an_abort_names_each_sample_until_it_ends(engine: DynamoEngine, stub: Stub) -> None:
    """A worker that does not know a request yet says ok and does nothing, so it is told again."""
    told: list[str] = []
    enough = threading.Event()

    def abort(body: Any) -> Reply:
        told.append(body["request_id"])
        if len(told) >= 4:
            enough.set()
        return OK

    def complete(_: Any) -> Reply:
        enough.wait(120)
        return answer(finish_reason="stop")

    stub.answers |= {"/engine/abort_request": abort, COMPLETIONS: complete}
    request = Request(PROMPT, Sampling(max_tokens=9, n=2), id="mine")
    thread, landed = in_flight(engine, request, lambda: len(stub.bodies(COMPLETIONS)) == 2)
    names = {headers["x-dynamo-request-id"] for headers in stub.headers if "x-dynamo-request-id" in headers}
    partial = engine.abort(["mine"])
    thread.join(120)
    assert set(told) == names
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in partial] == [("abort", 3)] * 2
    assert landed == partial


def test_without_workers_an_abort_closes_the_connection(stub: Stub) -> None:
    with DynamoEngine(stub.url, SPEC, timeout=120) as engine:
        stub.asked.clear()
        stub.answers[COMPLETIONS] = Reply(answer().body, seconds=60)
        request = Request(PROMPT, Sampling(max_tokens=3, n=2, ignore_eos=True), id="mine")
        thread, landed = in_flight(engine, request, lambda: len(stub.bodies(COMPLETIONS)) == 2)
        partial = engine.abort(["mine"])
        thread.join(120)
        assert [(sample.finish_reason, len(sample.token_ids)) for sample in partial] == [("abort", 0)] * 2
        assert landed == partial


def test_the_plugin_keeps_the_tokens_of_an_aborted_request(whole: DynamoEngine, stub: Stub, plugin: Plugin) -> None:
    ended = threading.Event()

    def generate(_: Any) -> Reply:
        ended.wait(120)
        return generated(finish_reason="stop")

    def route(body: Any) -> Reply:
        if body["method"] == "abort":
            ended.set()
        return plugin(body)

    stub.answers |= {GENERATE: generate, "/engine/router_replay": route}
    request = Request(PROMPT, Sampling(max_tokens=9), id="mine")
    thread, _ = in_flight(whole, request, lambda: len(stub.bodies(GENERATE)) == 1)
    [name] = [headers["x-dynamo-request-id"] for headers in stub.headers if "x-dynamo-request-id" in headers]
    [partial] = whole.abort(["mine"])
    thread.join(120)
    assert plugin.asked[0] == {"method": "abort", "request_ids": [name]}
    assert (partial.finish_reason, len(partial.token_ids), len(partial.routes)) == ("abort", 3, 6)


# -- weights ------------------------------------------------------------------------------------------


def test_weights_by_the_plugin(whole: DynamoEngine, stub: Stub, plugin: Plugin) -> None:
    whole.update_weights("/weights/3", version=3)
    asked = [path for path, _ in stub.asked if path.startswith("/engine/") and path != "/engine/router_replay"]
    assert asked == ["/engine/pause_generation", "/engine/resume_generation"]
    assert plugin.methods() == ["router_replay_find_weights", "router_replay_update_weights", "reset_prefix_cache"]
    assert plugin.asked[1]["kwargs"] == {"source": '{"path": "/weights/3"}'}
    assert one(whole).versions.tolist() == [3, 3, 3]
    assert stub.bodies(GENERATE)[-1]["cache_salt"] == "router-replay-version-3-1"


def test_weights_that_the_plugin_refuses_change_nothing(whole: DynamoEngine, plugin: Plugin) -> None:
    plugin.refuses = "no .safetensors file in /weights"
    with pytest.raises(EngineError, match=r"no \.safetensors file"):
        whole.update_weights("/weights", version=1)
    assert plugin.methods() == ["router_replay_find_weights"]
    assert one(whole).versions.tolist() == [0, 0, 0]


def test_a_kept_request_has_two_versions(whole: DynamoEngine, stub: Stub, plugin: Plugin) -> None:
    """The plugin reports rows by vLLM's own names, in which Dynamo's name of the request stands."""
    swapped = threading.Event()

    def generate(_: Any) -> Reply:
        swapped.wait(120)
        return generated(3)

    stub.answers[GENERATE] = generate
    thread, landed = in_flight(whole, Request(PROMPT, Sampling(3)), lambda: len(stub.bodies(GENERATE)) == 1)
    [name] = [headers["x-dynamo-request-id"] for headers in stub.headers if "x-dynamo-request-id" in headers]
    plugin.progress = {f"{name}-0a1b2c3d": 5, "another": 9}
    whole.update_weights("/weights/1", version=1, in_flight="keep")
    swapped.set()
    thread.join(120)
    [completion] = landed
    assert completion.versions.tolist() == [0, 0, 1]
    assert completion.routes.versions.tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("keep", [False, True])
def test_the_request_of_a_dead_worker_is_sent_again_unless_weights_changed(
    whole: DynamoEngine, stub: Stub, plugin: Plugin, keep: bool
) -> None:
    """Dynamo answers 503. A new answer is of the weights of now, and a kept request has rows of older ones."""
    dead = threading.Event()

    def generate(_: Any) -> Reply:
        if len(stub.bodies(GENERATE)) > 1:
            return generated(3)
        dead.wait(120)
        return Reply({"message": "Service temporarily unavailable", "code": 503}, 503)

    stub.answers[GENERATE] = generate
    said: list[Any] = []

    def ask() -> None:
        try:
            said.append(one(whole, Request(PROMPT, Sampling(3))))
        except EngineError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: len(stub.bodies(GENERATE)) == 1)
    if keep:
        [name] = [headers["x-dynamo-request-id"] for headers in stub.headers if "x-dynamo-request-id" in headers]
        plugin.progress = {f"{name}-0a1b2c3d": 5}
        whole.update_weights("/weights/1", version=1, in_flight="keep")
    dead.set()
    thread.join(120)
    if keep:
        assert "a worker died" in said[0]
    else:
        assert said[0].versions.tolist() == [0, 0, 0]


def test_a_cache_that_is_not_reset_ends_the_engine(whole: DynamoEngine, plugin: Plugin) -> None:
    plugin.reset = False
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        whole.update_weights("/weights/1", version=1)
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        one(whole)


def test_weights_without_the_plugin(stub: Stub) -> None:
    with DynamoEngine(stub.url, SPEC, workers=[stub.url, stub.url], gpu_workers=True) as engine:
        stub.asked.clear()
        engine.update_weights("/weights/3", version=3)
        asked = [path for path, _ in stub.asked if path.startswith("/engine/")]
        order = ["pause_generation", "update_weights_from_disk", "resume_generation"]
        assert asked == [f"/engine/{name}" for name in order for _ in range(2)]
        assert stub.bodies("/engine/update_weights_from_disk")[0] == {"model_path": "/weights/3", "weight_version": "3"}
        assert one(engine, Request(PROMPT, Sampling(3, ignore_eos=True))).versions.tolist() == [3, 3, 3]


def test_a_worker_that_says_error_with_200_ends_the_engine(engine: DynamoEngine, stub: Stub) -> None:
    stub.answers["/engine/update_weights_from_disk"] = Reply({"status": "error", "message": "no such folder"})
    with pytest.raises(EngineError, match="no such folder"):
        engine.update_weights("/nowhere", version=1)
    with pytest.raises(EngineError, match="may serve different weights"):
        one(engine)


def test_who_cannot_load_says_why(stub: Stub) -> None:
    with DynamoEngine(stub.url, SPEC) as engine, pytest.raises(EngineError, match="no workers= were given"):
        engine.update_weights("/weights", version=1)
    with DynamoEngine(stub.url, SPEC, workers=[stub.url]) as engine:
        with pytest.raises(EngineError, match=r"wrong experts on a CPU.*gpu_workers=True"):
            engine.update_weights("/weights", version=1)
        with pytest.raises(EngineError, match="Hugging Face folder"):
            engine.update_weights(type("Shared", (), {"info": dict})(), version=1)
        with pytest.raises(EngineError, match="needs the plugin"):
            engine.report()


def test_a_pause_that_one_worker_refuses_holds_none(stub: Stub) -> None:
    stub.answers["/engine/pause_generation"] = [OK, Reply({"status": "error", "message": "busy"}), OK]
    with DynamoEngine(stub.url, SPEC, workers=[stub.url, stub.url]) as engine:
        with pytest.raises(EngineError, match="busy"):
            engine.pause()
        assert len(stub.bodies("/engine/resume_generation")) == 2
        one(engine, Request(PROMPT, Sampling(3, ignore_eos=True)))
