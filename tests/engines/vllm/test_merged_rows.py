"""Two parts of an answer that a slow reader gets as one keep the rows of the later part."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from router_replay.engines.vllm.plugin.repairs import merged_rows

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def test_merged_parts_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    def part(rows: np.ndarray | None, *indices: int) -> RequestOutput:
        outputs = [CompletionOutput(index, "", [7], 0.0, None, routed_experts=rows) for index in indices]
        return RequestOutput("r", None, [1], None, outputs, finished=rows is not None)

    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)  # put back afterwards
    rows = np.ones((2, 3, 4), np.uint8)
    merged_rows.install()
    for aggregate in (True, False):
        first = part(None, 0, 1)
        first.add(part(rows, 1), aggregate=aggregate)
        assert [output.routed_experts is rows for output in first.outputs] == [False, True]
        assert list(first.outputs[1].token_ids) == ([7, 7] if aggregate else [7])
    merged_rows.install()
    first = part(None, 0)
    first.add(part(None, 0), aggregate=True)
    assert first.outputs[0].routed_experts is None
