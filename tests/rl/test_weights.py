"""What the engine gets is the policy: cast, and rounded where asked."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay import RouterReplay
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.types import Request, Sampling
from router_replay.engines.vllm.weights import share
from router_replay.rl.config import EngineConfig
from router_replay.rl.weights import SHARED_MEMORY, WeightSync, _is_locked, fp8_rounded, sweep


def load(folder: pathlib.Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def model(random_model: pathlib.Path) -> torch.nn.Module:
    return load(random_model)


def sync(model: torch.nn.Module, tmp_path: pathlib.Path, **settings: str) -> WeightSync:
    config = EngineConfig(weights=str(tmp_path), **settings)
    return WeightSync(config, model, RouterReplay(model).router_names)


@pytest.mark.parametrize("kind", ["vllm_http", "embedded"])  # through a folder, and as tensors
def test_an_engine_that_gets_new_weights_answers_with_them(
    model: torch.nn.Module, random_model: pathlib.Path, tmp_path: pathlib.Path, kind: str
) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    request = Request((5, 6, 7), Sampling(4, 0.0))
    pushes = sync(model, tmp_path, kind=kind, dtype="float32")
    with EmbeddedEngine(random_model, dtype=torch.float32) as engine:
        [before] = engine.generate([request])
        pushes.push(engine, model.state_dict(), 7)
        [after] = engine.generate([request])
        assert (engine.version, set(after.versions.tolist())) == (7, {7})
    model.save_pretrained(tmp_path / "expected")
    with EmbeddedEngine(tmp_path / "expected", dtype=torch.float32) as fresh:
        [expected] = fresh.generate([request])
    assert np.array_equal(after.logprobs, expected.logprobs)
    assert not np.array_equal(after.logprobs, before.logprobs)
    pushes.close()
    assert [path.name for path in tmp_path.iterdir()] == ["expected"]  # nothing is left behind


def test_fp8_rounds_the_matrices_and_leaves_routers_norms_embeddings_and_head(
    model: torch.nn.Module, tmp_path: pathlib.Path
) -> None:
    state = model.state_dict()
    given = sync(model, tmp_path, quantise="fp8", dtype="float32").for_engine(state)
    changed = {name for name, tensor in given.items() if not torch.equal(tensor, state[name])}
    kinds = {name.split(".", 3)[-1].removesuffix(".weight") for name in changed}
    assert kinds == {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }  # fmt: skip


def test_fp8_rounding_is_float8_with_one_scale_per_block() -> None:
    tensor = torch.randn(2, 130, 200, generator=torch.Generator().manual_seed(0)).clamp(min=-2, max=2)
    tensor[0, 0, 0] = 1e6  # beside it all others of its block, and of no other, are too small for a float8
    rounded = fp8_rounded(tensor)
    assert rounded[0, 0, 0] == 1e6
    assert int(rounded[0, :128, :128].count_nonzero()) == 1
    half_a_unit = 2.0**-4  # of e4m3's three mantissa bits
    for clean, exact in ((rounded[1], tensor[1]), (rounded[0, :, 128:], tensor[0, :, 128:])):
        error = (clean - exact).abs() / exact.abs().clamp(min=0.05)
        assert 0 < float(error.max()) < half_a_unit * 1.01
    assert torch.equal(fp8_rounded(torch.zeros(4, 4)), torch.zeros(4, 4))


def test_what_killed_runs_left_in_memory_is_swept(tmp_path: pathlib.Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"router-replay-{dead.pid}-folder" / "version_1").mkdir(parents=True)
    (tmp_path / f"router-replay-{dead.pid}-segment").touch()
    (tmp_path / f"router-replay-{os.getpid()}-alive").mkdir()
    (tmp_path / "router-replay-somebodys").touch()
    # Of a process that is not seen from here, as one in another container: its lock is.
    unseen = tmp_path / f"router-replay-{dead.pid}-locked"
    unseen.mkdir()
    handle = os.open(unseen, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    sweep(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([f"router-replay-{os.getpid()}-alive", "router-replay-somebodys", unseen.name])
    os.close(handle)
    sweep(tmp_path)
    assert not unseen.exists()


def test_what_is_in_use_is_locked(model: torch.nn.Module, tmp_path: pathlib.Path) -> None:
    pushes = sync(model, tmp_path, kind="vllm")
    [folder] = tmp_path.iterdir()
    with share({"a": torch.zeros(3)}) as segment:
        for path in (folder, SHARED_MEMORY / segment.name):
            assert _is_locked(path)
    pushes.close()
    assert not folder.exists()
