"""A pool of a real Dynamo and engines of other kinds; run by `make test-dynamo`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from router_replay.engines import VllmHttpEngine
from tests.dynamo_real.conftest import CAPTURING, connect
from tests.dynamo_real.processes import Dynamo
from tests.engines.conftest import VOCABULARY, Checkpoints, prompt, start_server
from tests.engines.mixed_pool import check_that_nothing_is_lost, check_that_training_goes_on

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def mine(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    """One worker and one frontend, which the last check of this file kills."""
    dynamo = Dynamo(tmp_path_factory.mktemp("doomed"))
    try:
        dynamo.start_worker(checkpoints.a, CAPTURING, "--enable-rl", ROUTER_REPLAY_VLLM="required")
        dynamo.start_frontend("generate", generate=True)
        dynamo.wait()
        yield dynamo
    finally:
        dynamo.stop()


def test_a_killed_vllm_server_leaves_its_episodes_to_dynamo(
    mine: Dynamo, checkpoints: Checkpoints, tmp_path: pathlib.Path, verified: Say
) -> None:
    doomed = start_server(checkpoints.a, tmp_path / "vllm.log")
    try:
        first = doomed.wait(lambda: VllmHttpEngine(doomed.url))
        said = check_that_nothing_is_lost(first, connect(mine, "generate"), doomed.kill, prompt, length=150)
    finally:
        doomed.kill()
    verified(f"a pool with Dynamo, vLLM killed: {said}")


def test_training_on_dynamo_and_the_embedded_engine(
    mine: Dynamo, checkpoints: Checkpoints, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, verified: Say
) -> None:
    tables = [
        "{dtype = 'float32', max_length = 128}",
        f"{{kind = 'dynamo', url = '{mine.frontends['generate'].url}', workers = ['{mine.workers[0].url}'], "
        "model = 'moe', dtype = 'float32', max_length = 128}",
    ]
    words = [f"t{token}" for token in range(3, VOCABULARY)]
    said = check_that_training_goes_on(tables, checkpoints.a, words, mine.stop, tmp_path, monkeypatch)
    verified(f"router-replay train with [[engines]]: {said}")
