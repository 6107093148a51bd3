"""New weights that are written into the tensors of two ranks of a running vLLM: each rank writes its own share."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from safetensors.torch import load_file

from router_replay.engines import Request
from router_replay.engines.vllm.weights import share
from tests.engines.conftest import ENVIRONMENT, GREEDY, SHAPE, Checkpoints, environment, one, prompt, same
from tests.engines.vllm.test_direct import PLAIN
from tests.engines.vllm.test_parallel import reports

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.mark.parametrize("experts", [False, True], ids=["tensor parallel", "expert and tensor parallel"])
def test_each_rank_writes_what_vllms_loader_would_load(checkpoints: Checkpoints, experts: bool) -> None:
    from router_replay.engines.vllm.inprocess import VllmEngine

    layout: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": experts, **PLAIN}
    states = {name: load_file(pathlib.Path(folder, "model.safetensors")) for name, folder in vars(checkpoints).items()}
    with environment(**ENVIRONMENT), VllmEngine(checkpoints.a, **SHAPE, **layout) as engine:
        on_a = one(engine, Request(prompt(), GREEDY))
        engine.update_weights(checkpoints.b, 1)  # by vLLM's loader, and then checked on every rank
        on_b = one(engine, Request(prompt(), GREEDY))
        assert not same(on_a, on_b)
        assert [report["weights"]["by_loader"] for report in reports(engine)] == [{}, {}]
        for version, name, expected in ((2, "a", on_a), (3, "b", on_b)):
            with share(states[name]) as shared:
                engine.update_weights(shared, version)
            assert same(one(engine, Request(prompt(), GREEDY)), expected)
            for weights in (report["weights"] for report in reports(engine)):
                assert weights["seconds_direct"] > 0
                assert weights["direct_parameters"] <= weights["copies"] < len(states[name])
