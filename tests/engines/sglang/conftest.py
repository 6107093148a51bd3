"""An SGLang server that says what a test tells it to, and an engine that is connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router_replay.engines import SglangEngine, http
from router_replay.engines.sglang import engine as sglang
from tests.engines.sglang.server import INFO, SPEC, answer
from tests.engines.stub import Reply, Stub, serving


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
    with SglangEngine(stub.url, SPEC, timeout=60) as engine:
        yield engine
