"""A Dynamo frontend and worker that say what a test tells them to, and an engine that is connected to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router_replay.engines import DynamoEngine, http
from tests.engines.dynamo.server import SPEC, answer
from tests.engines.stub import Reply, Stub, serving


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    with serving() as stub:
        stub.answers |= {
            "/v1/models": Reply({"object": "list", "data": [{"id": "moe"}]}),
            "/v1/completions": answer(),
            "/engine/pause_generation": Reply({"status": "ok"}),
            "/engine/resume_generation": Reply({"status": "ok"}),
            "/engine/update_weights_from_disk": Reply({"status": "ok"}),
        }
        yield stub


@pytest.fixture
def engine(stub: Stub) -> Iterator[DynamoEngine]:
    with DynamoEngine(stub.url, SPEC, workers=[stub.url], timeout=5) as engine:
        yield engine
