"""Connecting to an SGLang server and what it says of itself, and servers that are dead, slow, broken or busy."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
from typing import Any

import pytest

from router_replay.engines import Request, Sampling, http
from router_replay.engines.sglang import SglangEngine
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.sglang.server import INFO, PROMPT, SPEC, Background, answer, one
from tests.engines.stub import Reply, Stub, eventually

# -- connecting -------------------------------------------------------------------------------------


def test_what_the_server_cannot_do_is_said(stub: Stub) -> None:
    stub.answers["/server_info"] = Reply({**INFO, "enable_return_routed_experts": False, "version": "0.6.0"})
    stub.answers["/generate"] = answer(routed_experts=None)
    with SglangEngine(stub.url, SPEC) as engine:
        assert not engine.capabilities.routes
        assert "--enable-return-routed-experts" in engine.capabilities.why_not
        assert "0.6.0 was not tested" in engine.capabilities.why_not
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
    with pytest.raises(EngineError, match=r"but spec=RouterSpec\(num_experts=8, .* was given"):
        SglangEngine(stub.url, RouterSpec(num_experts=8, top_k=2, layers=(0, 1)))
    stub.answers["/model_info"] = Reply({"model_path": "org/model"})
    with pytest.raises(EngineError, match="pass spec="):
        SglangEngine(stub.url)


# -- servers that are not well ----------------------------------------------------------------------


def test_a_dead_server(stub: Stub) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=r"no SGLang server at .* after 5 attempts"):
        SglangEngine(url, SPEC)


def test_a_slow_server(stub: Stub) -> None:
    with SglangEngine(stub.url, SPEC, timeout=0.3) as engine:
        stub.answers["/generate"] = Reply(answer().body, seconds=60)
        with pytest.raises(EngineError, match="did not answer in time"):
            one(engine)
    assert len(stub.bodies("/generate")) == 1


def test_half_an_answer_is_no_sample(engine: SglangEngine, stub: Stub) -> None:
    """It is not sent again either: the server may be at work on it."""
    stub.answers["/generate"] = Reply(answer().body, sent=200)
    with pytest.raises(EngineError, match="broke before the answer was complete"):
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
    stub.answers["/generate"] = Reply(answer().body, seconds=60)
    flying = Background(engine, Request(PROMPT, Sampling(max_tokens=3)))
    eventually(lambda: len(stub.bodies("/generate")) == 1)
    engine.close()
    flying.join()
    assert flying.error is not None
    with pytest.raises(EngineError, match="was closed"):
        one(engine)
