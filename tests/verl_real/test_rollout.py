"""Rows of a real vLLM go through verl's own fields into its engine, and close the gap between the two."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import pickle
import subprocess
from typing import Any

import pytest
import torch

from tests.verl_real import tiny

# isort: split
from router_replay import measure, recipes

MODEL = pathlib.Path(recipes.__file__).parent / "tiny" / "ready"
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """From the environment below this one: vLLM need not fit the transformers of this one."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    python = pathlib.Path(found.origin).parents[4] / "bin" / "python"
    file = tmp_path_factory.mktemp("vllm") / "rows.pickle"
    command = [str(python), "-m", "tests.verl_real.vllm_rows", str(MODEL), str(file)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return pickle.loads(file.read_bytes())


def outputs_of(answers: list[dict[str, Any]], shift: int = 0) -> list[Any]:
    made = []
    for answer in answers:
        rows = answer["routed_experts"]
        rows = rows if not shift else rows[[*range(shift, len(rows)), *range(shift)]]
        mask = [1] * len(answer["response_ids"])
        made.append(
            tiny.AgentLoopOutput(
                **answer | {"routed_experts": rows}, response_mask=mask, metrics=tiny.AgentLoopMetrics()
            )
        )
    return made


def k3(engine: Any, answers: list[dict[str, Any]], shift: int = 0) -> float:
    data = tiny.batch_of(outputs_of(answers, shift), max_token_len_per_gpu=512)
    scored = tiny.score(engine, data)
    trained = tiny.response_from_nested(scored["log_probs"], data["response_mask"]).values().float()
    rollout = torch.tensor([line for answer in answers for line in answer["response_logprobs"]])
    return measure.logprob_gap(trained, rollout, torch.ones(len(rollout), dtype=torch.bool)).k3


def test_r3_closes_the_gap_to_vllm(model: str, answers: list[dict[str, Any]]) -> None:
    mixed = {"mixed_precision": None}  # verl's default: bfloat16
    live = k3(tiny.engine(str(MODEL), "disabled", **mixed), answers)
    engine = tiny.engine(str(MODEL), "R3", **mixed)
    replayed = k3(engine, answers)
    assert replayed < live / 2
    assert k3(engine, answers, shift=1) > 10 * live  # row t is token t's, and no other's
