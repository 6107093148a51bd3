"""Which weights a row of SGLang's belongs to, refusals where that is not known, and loading other weights."""

from __future__ import annotations

import pytest

from router_replay.engines.sglang import SglangEngine
from router_replay.errors import EngineError
from tests.engines.sglang.server import answer, one, spans
from tests.engines.stub import Reply, Stub

# -- versions ---------------------------------------------------------------------------------------


def test_a_request_held_in_place_keeps_both_versions(engine: SglangEngine, stub: Stub) -> None:
    """Row r sampled the token after it, so the swap shows one row before the first token of the new weights."""
    stub.answers["/generate"] = answer(weight_versions=spans(("default", 1), ("1", 3)))
    engine._connected._names["1"] = 1
    completion = one(engine)
    assert completion.versions.tolist() == [0, 1, 1]
    assert completion.routes.versions.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("retractions", [1, None])
def test_retract_and_swap_is_refused(engine: SglangEngine, stub: Stub, retractions: int | None) -> None:
    stub.answers["/generate"] = answer(weight_versions=spans(("default", 1), ("1", 3)), num_retractions=retractions)
    engine._connected._names["1"] = 1
    with pytest.raises(EngineError, match="rows come from the new weights and their log-probs from the old ones"):
        one(engine)


def test_a_retraction_without_a_swap_is_fine(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(num_retractions=2)
    assert len(one(engine).routes) == 6


def test_a_prompt_of_unknown_weights_is_refused(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(weight_versions=spans(("1", 3)))
    engine._connected._names["1"] = 1
    with pytest.raises(EngineError, match="it is unknown which of them routed the prompt"):
        one(engine)


# -- weights ----------------------------------------------------------------------------------------


def test_update_names_the_version_and_holds_the_server(engine: SglangEngine, stub: Stub) -> None:
    engine.update_weights("/weights/1", version=1)
    paths = [path for path, _ in stub.asked if path not in ("/server_info", "/model_info")]
    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert stub.bodies("/pause_generation") == [{"mode": "in_place"}]
    [body] = stub.bodies("/update_weights_from_disk")
    assert body == {"model_path": "/weights/1", "weight_version": "1", "flush_cache": True}
    stub.answers["/generate"] = answer(weight_versions=spans(("1", 3)))
    assert one(engine).versions.tolist() == [1, 1, 1]
    assert stub.bodies("/generate")[-1]["extra_key"] == "router-replay-1"


def test_the_same_version_again_gets_a_name_of_its_own(engine: SglangEngine, stub: Stub) -> None:
    """SGLang records no change, and keeps its cache's keys, where the name stays the same."""
    for _ in range(2):
        engine.update_weights("/weights", version=1)
    first, second = (body["weight_version"] for body in stub.bodies("/update_weights_from_disk"))
    assert first != second
    assert engine.version == 1


NOT_FLUSHED = Reply(
    {"success": False, "message": "Weights were updated, but the cache was not flushed because requests are running."},
    400,
)


def test_an_unflushed_cache_is_flushed_again(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/update_weights_from_disk"] = NOT_FLUSHED
    stub.answers["/flush_cache"] = [Reply(b"busy", 400), Reply(b"busy", 400), Reply(b"Cache flushed.\n")]
    engine.update_weights("/weights", version=1)
    assert len(stub.bodies("/flush_cache")) == 3
    assert stub.bodies("/update_weight_version") == [{"new_version": "1", "abort_all_requests": False}]
    assert engine.version == 1


def test_a_cache_that_stays_unflushed_ends_the_engine(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/update_weights_from_disk"] = NOT_FLUSHED
    stub.answers["/flush_cache"] = Reply(b"busy", 400)
    with pytest.raises(EngineError, match="did not flush its cache in 6 attempts"):
        engine.update_weights("/weights", version=1)
    assert len(stub.bodies("/flush_cache")) == 6
    with pytest.raises(EngineError, match="did not flush"):
        one(engine)


def test_weights_that_could_not_be_read_change_nothing(engine: SglangEngine, stub: Stub) -> None:
    message = "Failed to get weights iterator: no such folder."
    stub.answers["/update_weights_from_disk"] = Reply({"success": False, "message": message}, 400)
    with pytest.raises(EngineError, match="no such folder"):
        engine.update_weights("/nowhere", version=1)
    assert one(engine).versions.tolist() == [0, 0, 0]


def test_a_failed_load_ends_the_engine(engine: SglangEngine, stub: Stub) -> None:
    message = "Failed to update weights: shape.\nRolling back to original weights."
    stub.answers["/update_weights_from_disk"] = Reply({"success": False, "message": message}, 400)
    with pytest.raises(EngineError, match="It is unknown which weights it has now"):
        engine.update_weights("/wrong", version=1)
    with pytest.raises(EngineError, match="It is unknown which weights it has now"):
        one(engine)
