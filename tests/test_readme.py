"""The README's code runs as it stands there."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import torch

from router_replay import RouterSpec, Routes, wire
from tests.makers import random_ids
from tests.replay import tiny

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_code_for_ones_own_trainer_runs() -> None:
    rollout, trainer = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    model = tiny.make("qwen3_moe").model
    spec = RouterSpec.from_config(model.config)
    capture = Routes(random_ids(9, spec), spec)  # prompt 4 + completion 6 - 1
    names = {
        "model": model,
        "choice": {"routed_experts": wire.to_vllm(capture)},
        "prompt_ids": [3, 4, 5, 6],
        "completion_ids": [7, 8, 9, 10, 11, 12],
        "completion_logprobs": np.full(6, -2.0),
    }
    printed: list[tuple] = []
    exec(rollout + trainer, {**names, "print": lambda *values: printed.append(values)})
    k3, stats = printed[0]
    assert k3 > 0
    assert set(stats.rows_replayed) == {9}
    assert set(stats.rows_live) == {0}  # the last token predicts nothing
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
