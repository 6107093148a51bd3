"""A pool of a real Dynamo and a real vLLM server; run by `make test-dynamo`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from router_replay.engines import Completion, VllmHttpEngine
from tests.dynamo_real.conftest import connect
from tests.dynamo_real.processes import Dynamo
from tests.engines.conftest import Checkpoints, prompt, start_server
from tests.engines.mixed_pool import check_that_nothing_is_lost


def test_a_killed_vllm_server_leaves_its_episodes_to_dynamo(
    dynamo: Dynamo,
    fresh_b: Completion,
    checkpoints: Checkpoints,
    tmp_path: pathlib.Path,
    verified: Callable[[str], None],
) -> None:
    doomed = start_server(checkpoints.b, tmp_path / "vllm.log")
    try:
        first = doomed.wait(lambda: VllmHttpEngine(doomed.url))
        other = connect(dynamo, "generate")
        other.update_weights(checkpoints.b, 0)  # whatever another check has loaded
        said = check_that_nothing_is_lost(first, other, doomed.kill, prompt, length=150)
    finally:
        doomed.kill()
    verified(f"a pool with Dynamo, vLLM killed: {said}")
