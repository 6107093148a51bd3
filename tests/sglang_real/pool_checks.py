"""A pool of a real SGLang server and engines of other kinds; run by `make test-sglang`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from router_replay.engines import VllmHttpEngine
from router_replay.engines.sglang import SglangEngine
from tests.engines.conftest import start_server
from tests.engines.mixed_pool import check_that_nothing_is_lost, check_that_training_goes_on
from tests.sglang_real.conftest import VOCABULARY, Server, prompt


@pytest.fixture
def doomed(models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> Iterator[Server]:
    server = Server(models[0], tmp_path / "sglang.log")
    yield server
    server.stop()


def test_a_killed_sglang_server_leaves_its_episodes_to_vllm(
    models: tuple[pathlib.Path, pathlib.Path], doomed: Server, tmp_path: pathlib.Path, verified: Callable[[str], None]
) -> None:
    beside = start_server(str(models[0]), tmp_path / "vllm.log")
    try:
        other = beside.wait(lambda: VllmHttpEngine(beside.url))
        first = SglangEngine(doomed.url, timeout=120)
        said = check_that_nothing_is_lost(first, other, doomed.stop, prompt, length=150)
    finally:
        beside.kill()
    verified(f"a pool with vLLM, SGLang killed: {said}")


def test_training_on_sglang_and_the_embedded_engine(
    models: tuple[pathlib.Path, pathlib.Path],
    doomed: Server,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    verified: Callable[[str], None],
) -> None:
    tables = [
        "{dtype = 'float32', max_length = 128}",
        f"{{kind = 'sglang', url = '{doomed.url}', dtype = 'float32', max_length = 128}}",
    ]
    words = [f"w{token}" for token in range(3, VOCABULARY)]
    said = check_that_training_goes_on(
        tables, str(models[0]), words, doomed.stop, tmp_path, monkeypatch, "rollout.seeded=false"
    )  # this server has no deterministic inference
    verified(f"router-replay train with [[engines]]: {said}")
