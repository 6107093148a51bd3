"""What `router-replay verify` asks of a server whose answers are given: no seed, which not every server takes.

Real servers are in `tests/engines/vllm/test_stock.py` and `test_guard.py`, and in the checks of SGLang and Dynamo.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from router_replay.spec import RouterSpec
from tests.engines.dynamo import conftest as dynamo_stub
from tests.engines.dynamo import server as dynamo
from tests.engines.sglang import conftest as sglang_stub
from tests.engines.sglang import server as sglang
from tests.engines.stub import Stub
from tests.makers import random_routes
from tests.verify.by_url import verdict
from tests.verify.test_verify import make_model

pytest.importorskip("aiohttp")
sglang_server, dynamo_server = sglang_stub.stub, dynamo_stub.stub
ROWS = 4 + 12 - 1  # of a prompt of four tokens and twelve sampled ones


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_model(tmp_path_factory.mktemp("servers") / "model")


@pytest.fixture(scope="module")
def spec(model: pathlib.Path) -> RouterSpec:
    return RouterSpec.from_config(json.loads((model / "config.json").read_text()))


@pytest.fixture
def prompts(tmp_path: pathlib.Path) -> tuple[str, str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [5, 6, 7, 8]}\n' * 10)
    return "--prompts", str(file)


def test_an_sglang_server_that_refuses_seeds_is_verified(
    sglang_server: Stub,
    model: pathlib.Path,
    spec: RouterSpec,
    prompts: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    sglang_server.answers["/generate"] = sglang.answer(12, routes=random_routes(ROWS, spec))
    status, facts = verdict(capsys, str(model), f"sglang={sglang_server.url}", *prompts)
    assert (status, facts["finding"]["fault"]) == (1, "other-tokens")  # the rows are random
    bodies = sglang_server.bodies("/generate")
    assert len(bodies) == facts["sequences"] == 10
    assert all("sampling_seed" not in body["sampling_params"] for body in bodies)


def test_a_dynamo_without_the_generate_route_is_verified(
    dynamo_server: Stub,
    model: pathlib.Path,
    spec: RouterSpec,
    prompts: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has to be told the end-of-sequence tokens, which the model's folder names."""
    dynamo.only_completions(dynamo_server, dynamo.answer(12, routes=random_routes(ROWS, spec)))
    status, facts = verdict(capsys, str(model), f"dynamo={dynamo_server.url}", *prompts)
    assert (status, facts["finding"]["fault"]) == (1, "other-tokens")
    bodies = dynamo_server.bodies(dynamo.COMPLETIONS)[-10:]
    assert facts["sequences"] == 10
    assert all("seed" not in body for body in bodies)
