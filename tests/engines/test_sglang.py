"""What SglangEngine sends, and what it makes of SGLang's answers, good and bad. The real server: tests/sglang_real."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from router_replay import wire
from router_replay.engines import Completion, Request, Sampling, http, sglang
from router_replay.engines.sglang import SglangEngine
from router_replay.engines.sglang_answers import routes_of_openai
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.stub import Reply, Stub, eventually, serving
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1), num_layers=2)
PROMPT = (5, 6, 7, 8)
RECORDED = pathlib.Path(__file__).parent / "payloads" / "sglang_generate.json"
INFO = {"version": "0.5.23", "enable_return_routed_experts": True, "disaggregation_mode": "null", "pp_size": 1}


def answer(tokens: int = 3, *, prompt: int = 4, start: int = 0, routes: Routes | None = None, **meta: Any) -> Reply:
    ids = [10 + number for number in range(tokens)]
    routes = random_routes(prompt + tokens - 1 - start, SPEC) if routes is None else routes
    information = {
        "id": "x",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": prompt,
        "weight_version": "default",
        "num_retractions": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "output_token_logprobs": [[-0.5 * number, token, None] for number, token in enumerate(ids)],
        "routed_experts": wire.to_sglang(routes),
    }
    return Reply({"output_ids": ids, "meta_info": {**information, **meta}})


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(sglang, "FIRST_PAUSE", 0.01)
    with serving() as stub:
        stub.answers |= {
            "/server_info": Reply(INFO),
            "/model_info": Reply({"model_path": "/not/here", "weight_version": "default"}),
            "/generate": answer(),
            "/abort_request": Reply(b""),
            "/pause_generation": Reply({"status": "ok"}),
            "/continue_generation": Reply({"status": "ok"}),
            "/update_weights_from_disk": Reply({"success": True, "message": "Succeeded", "num_paused_requests": 0}),
            "/update_weight_version": Reply({"success": True}),
            "/flush_cache": Reply(b"Cache flushed.\n"),
        }
        yield stub


@pytest.fixture
def engine(stub: Stub) -> Iterator[SglangEngine]:
    with SglangEngine(stub.url, SPEC, timeout=5) as engine:
        yield engine


def one(engine: SglangEngine, request: Request | None = None) -> Completion:
    [completion] = engine.generate([request or Request(PROMPT, Sampling(max_tokens=3))])
    return completion


class Background:
    """A request in a thread of its own."""

    def __init__(self, engine: SglangEngine, request: Request) -> None:
        self.landed: list[Completion] = []
        self.error: EngineError | None = None
        self._thread = threading.Thread(target=self._work, args=(engine, request))
        self._thread.start()

    def _work(self, engine: SglangEngine, request: Request) -> None:
        try:
            self.landed = engine.generate([request])
        except EngineError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


# -- what is sent -----------------------------------------------------------------------------------


def test_the_request_says_everything(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(2, start=3)
    one(
        engine, Request(PROMPT, Sampling(max_tokens=9, temperature=0.7, top_p=0.9, stop_token_ids=(3,)), routes_start=3)
    )
    [body] = stub.bodies("/generate")
    assert body["input_ids"] == [5, 6, 7, 8]
    assert body["return_routed_experts"] is True
    assert body["routed_experts_start_len"] == 3
    assert body["return_logprob"] is True
    assert body["stream"] is False
    assert body["extra_key"] == "router-replay-default"
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["temperature"], sampling["top_p"]) == (9, 0.7, 0.9)
    assert (sampling["top_k"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (-1, [3], False)


def test_each_sample_is_a_request_of_its_own(engine: SglangEngine, stub: Stub) -> None:
    """A name that begins another would abort both: SGLang compares beginnings."""
    samples = engine.generate([Request(PROMPT, Sampling(max_tokens=3, n=12))])
    assert [sample.index for sample in samples] == list(range(12))
    names = [body["rid"] for body in stub.bodies("/generate")]
    assert len(set(names)) == 12
    assert not any(a != b and b.startswith(a) for a in names for b in names)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(seed=1), "enable-deterministic-inference"),
        (Sampling(ignore_eos=True, stop_token_ids=(3,)), "no stop token where ignore_eos"),
    ],
)
def test_what_sglang_would_ignore_is_refused(engine: SglangEngine, stub: Stub, sampling: Sampling, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        one(engine, Request(PROMPT, sampling))
    assert not stub.bodies("/generate")


def test_a_server_of_fixed_seeds_gets_one_per_sample(stub: Stub) -> None:
    stub.answers["/server_info"] = Reply({**INFO, "enable_deterministic_inference": True})
    with SglangEngine(stub.url, SPEC) as engine:
        engine.generate([Request(PROMPT, Sampling(max_tokens=3, seed=40, n=3))])
    assert sorted(body["sampling_params"]["sampling_seed"] for body in stub.bodies("/generate")) == [40, 41, 42]


def test_forced_routes_are_refused_with_the_reason(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="SGLang cannot be told which experts"):
        one(engine, Request(PROMPT, forced_routes=random_routes(3, SPEC)))


# -- what is read -----------------------------------------------------------------------------------


def test_a_recorded_answer_of_the_real_server() -> None:
    recorded = json.loads(RECORDED.read_text())
    with serving() as stub:
        stub.answers = {"/server_info": Reply(INFO), "/model_info": Reply({}), "/generate": Reply(recorded)}
        with SglangEngine(stub.url, SPEC) as engine:
            completion = one(engine, Request((1, 2, 3, 4, 5, 6), Sampling(max_tokens=4)))
    assert completion.token_ids.tolist() == recorded["output_ids"]
    assert len(completion.routes) == 6 + 4 - 1
    assert completion.routes.all_captured
    assert wire.to_sglang(completion.routes) == recorded["meta_info"]["routed_experts"]
    assert completion.logprobs[1] == pytest.approx(recorded["meta_info"]["output_token_logprobs"][1][0])


def test_rows_tokens_and_versions(engine: SglangEngine, stub: Stub) -> None:
    routes = random_routes(4, SPEC, seed=3)
    stub.answers["/generate"] = answer(3, start=2, routes=routes)
    completion = one(engine, Request(PROMPT, Sampling(max_tokens=3), routes_start=2))
    assert completion.routes.same_sets(routes)
    assert completion.start == 2
    assert completion.token_ids.tolist() == [10, 11, 12]
    assert completion.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert completion.versions.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"<html>busy</html>"), "not understood"),
        (Reply({"output_ids": [1]}), "meta_info"),
        (answer(routed_experts=None), "without meta_info.routed_experts"),
        (answer(routed_experts="AAAA"), "not whole rows"),
        (answer(routed_experts="?!"), "base64"),
        (answer(routes=random_routes(5, SPEC)), "expected 6 rows"),
        (answer(routed_experts=wire.to_sglang(random_routes(7, SPEC))), "expected 6 rows"),
        (answer(prompt_tokens=3, routed_experts=wire.to_sglang(random_routes(6, SPEC))), "cut the prompt"),
        (answer(finish_reason=None), "finish_reason"),
        (answer(finish_reason={"type": "error"}), "finish_reason"),
        (answer(output_token_logprobs=[[-1.0, 10, None]]), "log-probs of 1 tokens for 3"),
        (answer(output_token_logprobs=[[-1.0, 9, None]] * 3), "of other tokens"),
        (answer(output_token_logprobs=[[None, 10, None], [-1, 11, None], [-1, 12, None]]), "has no log-prob"),
        (answer(weight_versions=None, weight_version=None), "which weights"),
        (answer(weight_versions=[{"version": "default", "start": 0, "end": 2}]), "do not cover"),
        (answer(weight_versions=[{"version": "theirs", "start": 0, "end": 3}]), "did not load"),
        (Reply({"error": {"message": "input is too long"}}, 400), "input is too long"),
        (Reply(b"oh no", 500), "answered 500: oh no"),
    ],
)
def test_bad_answers_are_refused(engine: SglangEngine, stub: Stub, reply: Reply, reason: str) -> None:
    stub.answers["/generate"] = reply
    with pytest.raises(EngineError, match=reason):
        one(engine)


def test_out_of_range_experts_are_refused(engine: SglangEngine, stub: Stub) -> None:
    wider = RouterSpec(num_experts=64, top_k=4, layers=(0, 1), num_layers=2)
    stub.answers["/generate"] = answer(routed_experts=wire.to_sglang(random_routes(6, wider)))
    with pytest.raises(EngineError, match=r"not all in \[0, 16\)"):
        one(engine)


# -- versions ---------------------------------------------------------------------------------------


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [{"version": name, "start": start, "end": end} for (name, end), start in zip(ends, starts, strict=False)]


def test_a_request_held_in_place_keeps_both_versions(engine: SglangEngine, stub: Stub) -> None:
    """Row r sampled the token after it, so the swap shows one row before the first token of the new weights."""
    stub.answers["/generate"] = answer(weight_versions=spans(("default", 1), ("1", 3)))
    engine._names["1"] = 1
    completion = one(engine)
    assert completion.versions.tolist() == [0, 1, 1]
    assert completion.routes.versions.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("retractions", [1, None])
def test_retract_and_swap_is_refused(engine: SglangEngine, stub: Stub, retractions: int | None) -> None:
    stub.answers["/generate"] = answer(weight_versions=spans(("default", 1), ("1", 3)), num_retractions=retractions)
    engine._names["1"] = 1
    with pytest.raises(EngineError, match="rows are the new weights'"):
        one(engine)


def test_a_retraction_without_a_swap_is_fine(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(num_retractions=2)
    assert len(one(engine).routes) == 6


def test_a_prompt_of_unknown_weights_is_refused(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = answer(weight_versions=spans(("1", 3)))
    engine._names["1"] = 1
    with pytest.raises(EngineError, match="routed the prompt is not known"):
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
    with pytest.raises(EngineError, match="did not flush its cache in 6 tries"):
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
    with pytest.raises(EngineError, match="What it holds now is unknown"):
        engine.update_weights("/wrong", version=1)
    with pytest.raises(EngineError, match="What it holds now is unknown"):
        one(engine)


# -- aborting and pausing ---------------------------------------------------------------------------


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
    updating.join(10)
    flying.join()
    assert engine.version == 1


def test_a_paused_engine_finishes_nothing(engine: SglangEngine, stub: Stub) -> None:
    until_aborted(stub, 2)
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    engine.pause("keep")
    with pytest.raises(EngineError, match="a paused engine finishes nothing"):
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
        assert loaded.wait(5)
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
        thread.join(10)
    flying.join()
    assert flying.landed[0].finish_reason == "abort"


def test_keep_loads_without_a_flush(engine: SglangEngine, stub: Stub) -> None:
    """A held request's blocks cannot be flushed; the name of the version in the cache's keys keeps them apart."""
    loaded = threading.Event()

    def generate(body: dict[str, Any]) -> Reply:
        loaded.wait(5)
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


# -- servers that are not well ----------------------------------------------------------------------


def test_a_dead_server(stub: Stub) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=r"no SGLang server at .* after 5 attempts"):
        SglangEngine(url, SPEC)


def test_a_slow_server(stub: Stub) -> None:
    with SglangEngine(stub.url, SPEC, timeout=0.3) as engine:
        stub.answers["/generate"] = Reply(answer().body, seconds=5)
        with pytest.raises(EngineError, match="did not answer in time"):
            one(engine)
    assert len(stub.bodies("/generate")) == 1


def test_half_an_answer_is_no_sample(engine: SglangEngine, stub: Stub) -> None:
    """It is not sent again either: the server may be at work on it."""
    stub.answers["/generate"] = Reply(answer().body, sent=200)
    with pytest.raises(EngineError, match="broke before the answer was whole"):
        one(engine)
    assert len(stub.bodies("/generate")) == 1


def test_a_busy_server_is_asked_again(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = [Reply(b"busy", 503), Reply(b"busy", 429), answer()]
    assert len(one(engine).token_ids) == 3
    assert len(stub.bodies("/generate")) == 3


def test_a_server_that_stays_busy(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = Reply(b"busy", 503)
    with pytest.raises(EngineError, match="answered 503: busy"):
        one(engine)
    assert len(stub.bodies("/generate")) == http.ATTEMPTS


def test_one_bad_request_does_not_spoil_the_others(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = lambda body: answer() if body["input_ids"][0] == 5 else Reply(b"no", 400)

    async def both() -> list[Any]:
        requests = [Request(PROMPT, Sampling(max_tokens=3)), Request((9, 9, 9, 9), Sampling(max_tokens=3))]
        return await asyncio.gather(*map(engine.submit, requests), return_exceptions=True)

    good, bad = asyncio.run(both())
    assert len(good) == 1
    assert isinstance(bad, EngineError)


def test_a_closed_engine(engine: SglangEngine, stub: Stub) -> None:
    stub.answers["/generate"] = Reply(answer().body, seconds=5)
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    engine.close()
    flying.join()
    assert flying.error is not None
    with pytest.raises(EngineError, match="was closed"):
        one(engine)


# -- connecting -------------------------------------------------------------------------------------


def test_what_the_server_cannot_do_is_said(stub: Stub) -> None:
    stub.answers["/server_info"] = Reply({**INFO, "enable_return_routed_experts": False, "version": "0.6.0"})
    stub.answers["/generate"] = answer(routed_experts=None)
    with SglangEngine(stub.url, SPEC) as engine:
        assert not engine.capabilities.routes
        assert "--enable-return-routed-experts" in engine.capabilities.why_not
        assert "0.6.0 was not tried" in engine.capabilities.why_not
        assert not one(engine).routes.captured.any()
    assert stub.bodies("/generate")[0]["return_routed_experts"] is False


def test_a_server_of_stale_rows_is_refused(stub: Stub) -> None:
    stub.answers["/server_info"] = Reply({**INFO, "enable_hierarchical_cache": True})
    with pytest.raises(EngineError, match="enable_hierarchical_cache=True: KV that is offloaded"):
        SglangEngine(stub.url, SPEC)


def test_the_older_names_of_the_routes(stub: Stub) -> None:
    for name in ("server_info", "model_info"):
        stub.answers[f"/get_{name}"] = stub.answers.pop(f"/{name}")
    with SglangEngine(stub.url, SPEC) as engine:
        assert engine.capabilities.routes


def test_the_spec_comes_from_the_models_folder(stub: Stub, tmp_path: pathlib.Path) -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    stub.answers["/model_info"] = Reply({"model_path": str(tmp_path)})
    with SglangEngine(stub.url) as engine:
        assert engine.spec == SPEC
    with pytest.raises(EngineError, match="the spec that was given"):
        SglangEngine(stub.url, RouterSpec(num_experts=8, top_k=2, layers=(0, 1)))
    stub.answers["/model_info"] = Reply({"model_path": "org/model"})
    with pytest.raises(EngineError, match="pass spec="):
        SglangEngine(stub.url)


# -- the OpenAI routes ------------------------------------------------------------------------------


def openai(choices: int = 1, **changes: Any) -> dict[str, Any]:
    response = {
        "choices": [{"index": number, "text": "w", "finish_reason": "length"} for number in range(choices)],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
        "metadata": {"weight_version": "default"},
        "sglext": {"routed_experts": wire.to_sglang(random_routes(6, SPEC))},
    }
    return {**response, **changes}


def test_sglext_of_an_openai_answer() -> None:
    assert routes_of_openai(openai(), SPEC).same_sets(random_routes(6, SPEC))
    assert len(routes_of_openai(json.dumps(openai()).encode(), SPEC)) == 6


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (openai(2), "2 choices, but sglext.routed_experts is one array"),
        (openai(sglext=None), "no sglext.routed_experts"),
        (openai(usage={"prompt_tokens": 4, "completion_tokens": 2}), "expected 5 rows"),
        (openai(metadata={"weight_versions": spans(("0", 1), ("1", 3))}), "weights changed"),
        ({"error": "no"}, "not an OpenAI response"),
    ],
)
def test_openai_answers_that_do_not_hold(response: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        routes_of_openai(response, SPEC)
