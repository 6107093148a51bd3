"""Answers of real vLLM servers, recorded: what /inference/v1/generate sends in each version is read here without vLLM.

`VLLM_RECORD=1 pytest tests/engines/vllm/test_payloads.py` writes the answer of the installed version anew.
"""

from __future__ import annotations

import json
import os
import pathlib
import urllib.request
from typing import Any

import pytest

from router_replay.engines import Engine
from router_replay.engines.vllm.http import samples_of
from router_replay.spec import RouterSpec
from tests.engines.conftest import KEY, Servers, prompt

FOLDER = pathlib.Path(__file__).with_name("payloads")
SPEC = RouterSpec(16, 4, (1, 2, 3))  # of the checkpoints, in whose first layer all tokens use the same weights
PROMPT, TOKENS, START = 6, 4, 2
REQUEST = {
    "request_id": "recorded",
    "token_ids": list(prompt(0, PROMPT)),
    "sampling_params": {
        "max_tokens": TOKENS, "seed": 3, "ignore_eos": True, "n": 2, "logprobs": 0, "detokenize": False,
        "routed_experts_prompt_start": START,
    },
}  # fmt: skip
VERSIONS = ("0.30", "0.32")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_answer_is_read(version: str) -> None:
    samples = samples_of((FOLDER / f"generate_{version}.json").read_bytes(), SPEC)
    assert [sample.index for sample in samples] == [0, 1]
    for sample in samples:
        assert len(sample.token_ids) == len(sample.logprobs) == TOKENS
        assert sample.rows is not None
        assert len(sample.rows) == PROMPT + TOKENS - 1 - START
        assert sample.rows[: PROMPT - START].same_sets(samples[0].rows[: PROMPT - START])  # both have one prompt
        assert sample.finish_reason == "length"
        assert all(logprob <= 0 for logprob in sample.logprobs)
    assert samples[0].token_ids != samples[1].token_ids


def test_the_recorded_answer_is_still_what_comes(vllm_http_engine: Engine, servers: Servers) -> None:
    import vllm

    recorded = FOLDER / f"generate_{'.'.join(vllm.__version__.split('.')[:2])}.json"
    answer = generate(servers.ours.url)
    if os.environ.get("VLLM_RECORD") == "1":
        recorded.write_text(json.dumps(answer, indent=1) + "\n")
    if not recorded.exists():
        pytest.skip(f"no answer of vLLM {vllm.__version__} is recorded")
    kept = json.loads(recorded.read_text())
    assert set(kept) == set(answer)
    assert [set(choice) for choice in kept["choices"]] == [set(choice) for choice in answer["choices"]]
    assert [choice["token_ids"] for choice in kept["choices"]] == [choice["token_ids"] for choice in answer["choices"]]


def generate(url: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(REQUEST).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    for name in ("model", "created"):  # of the machine and the moment
        answer.pop(name, None)
    return answer
