"""The verdict on a real vLLM: its rows belong to its tokens."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
ROOT = pathlib.Path(__file__).parents[2]


def test_the_rows_of_vllm_belong_to_its_tokens_and_replay_repairs_the_gap() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "router_replay.cli", "verify", "tiny", "--engine", "vllm", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    facts = json.loads(done.stdout)
    assert facts["finding"] is None
    assert facts["missing"] == 0
    assert 0 < facts["disagree"] < 0.2
    assert facts["replayed"]["k3"] < facts["live"]["k3"] / 1.5
