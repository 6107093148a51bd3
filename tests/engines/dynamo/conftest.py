"""A Dynamo that says what a test tells it to, and engines that are connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router_replay.engines import DynamoEngine, http
from tests.engines.dynamo.server import END, GENERATE, NO_PLUGIN, OK, PLUGIN, SPEC, Plugin, generated, only_completions
from tests.engines.stub import Reply, Stub, serving


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """As a user has it who does not know of us: no generate route, no plugin."""
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    with serving() as stub:
        stub.answers |= {
            "/v1/models": Reply({"object": "list", "data": [{"id": "moe"}]}),
            PLUGIN: NO_PLUGIN,
            "/engine/pause_generation": OK,
            "/engine/resume_generation": OK,
            "/engine/update_weights_from_disk": OK,
            "/engine/abort_request": OK,
        }
        only_completions(stub)
        yield stub


@pytest.fixture
def engine(stub: Stub) -> Iterator[DynamoEngine]:
    """By completions, without the plugin, with the caller's word that the workers run on GPUs."""
    with DynamoEngine(
        stub.url, SPEC, workers=[stub.url], timeout=60, end_of_sequence=[END], gpu_workers=True
    ) as engine:
        stub.asked.clear()
        stub.headers.clear()
        yield engine


@pytest.fixture
def plugin(stub: Stub) -> Plugin:
    plugin = Plugin()
    stub.answers |= {GENERATE: generated(), PLUGIN: plugin}
    return plugin


@pytest.fixture
def whole(stub: Stub, plugin: Plugin) -> Iterator[DynamoEngine]:
    """By the generate route, with the plugin."""
    with DynamoEngine(stub.url, workers=[stub.url], timeout=60) as engine:
        stub.asked.clear()
        stub.headers.clear()
        plugin.asked.clear()
        yield engine
