"""An engine behind a URL is started with the key of the environment and the policy's own vocabulary."""

from __future__ import annotations

import json
import pathlib

import pytest

from router_replay.engines import Request, Sampling
from router_replay.errors import ConfigError, EngineError
from router_replay.rl.config import load_config
from router_replay.rl.engine_start import GRAPH_SIZES, _graphs, start_engine
from tests.engines.sglang import conftest as sglang_stub
from tests.engines.sglang.server import PROMPT, SPEC
from tests.engines.stub import Stub

stub = sglang_stub.stub
SETTINGS = ["engine.kind=sglang", "engine.api_key_env=SERVER_KEY", "rollout.seeded=false"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 12}))
    return tmp_path


def test_the_key_of_the_environment_goes_with_every_call(
    stub: Stub, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "hunter2")
    config = load_config(None, [*SETTINGS, f"engine.url={stub.url}"])
    with start_engine(config, folder, SPEC, version=0) as engine:
        assert engine.vocabulary == 12
        stub.answers["/generate"] = sglang_stub.answer(weight_version="0", weight_versions=None)
        with pytest.raises(EngineError, match=r"sampled token 2 is 12, the vocabulary is \[0, 12\)"):
            engine.generate([Request(PROMPT, Sampling(max_tokens=3))])
    assert {headers.get("Authorization") for headers in stub.headers} == {"Bearer hunter2"}


def test_a_server_that_ignores_seeds_is_refused_unless_the_run_has_none(stub: Stub, folder: pathlib.Path) -> None:
    config = load_config(None, ["engine.kind=sglang", f"engine.url={stub.url}"])
    with pytest.raises(ConfigError, match=r"ignores seeds.*rollout\.seeded = false"):
        start_engine(config, folder, SPEC, version=0)
    assert "/generate" not in stub.asked
    unseeded = load_config(None, ["engine.kind=sglang", f"engine.url={stub.url}", "rollout.seeded=false"])
    start_engine(unseeded, folder, SPEC, version=0).close()


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_an_error(
    stub: Stub, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SERVER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVER_KEY", value)
    with pytest.raises(ConfigError, match=r"engine\.api_key_env = 'SERVER_KEY': this environment variable is not set"):
        start_engine(load_config(None, [*SETTINGS, f"engine.url={stub.url}"]), folder, SPEC, version=0)
    assert stub.asked == []


def test_cuda_graphs_reach_to_the_most_requests_of_a_step() -> None:
    assert _graphs({}) == {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    assert _graphs({"max_num_seqs": 4096})["cudagraph_capture_sizes"] == list(GRAPH_SIZES)
    assert _graphs({"max_num_seqs": 20})["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize("given", ["cudagraph_capture_sizes", "compilation_config", "enforce_eager"])
def test_what_the_user_says_about_graphs_stands(given: str) -> None:
    assert _graphs({given: None}) == {}
