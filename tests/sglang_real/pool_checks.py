"""A pool of a real SGLang server and a real vLLM server; run by `make test-sglang`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from router_replay.engines import VllmHttpEngine
from router_replay.engines.sglang import SglangEngine
from tests.engines.conftest import start_server
from tests.engines.mixed_pool import check_that_nothing_is_lost
from tests.sglang_real.conftest import Server, prompt


def test_a_killed_sglang_server_leaves_its_episodes_to_vllm(
    models: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path, verified: Callable[[str], None]
) -> None:
    beside = start_server(str(models[0]), tmp_path / "vllm.log")
    try:
        doomed = Server(models[0], tmp_path / "sglang.log")
        try:
            other = beside.wait(lambda: VllmHttpEngine(beside.url))
            first = SglangEngine(doomed.url, timeout=120)
            said = check_that_nothing_is_lost(first, other, doomed.stop, prompt, length=150)
        finally:
            doomed.stop()
    finally:
        beside.kill()
    verified(f"a pool with vLLM, SGLang killed: {said}")
