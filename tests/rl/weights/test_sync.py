"""What the engine gets is the policy: cast, and rounded where asked."""

from __future__ import annotations

import fcntl
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay import RouterReplay
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.shared_memory import SHARED_MEMORY, is_locked, sweep
from router_replay.engines.types import Request, Sampling
from router_replay.engines.vllm.weights import share
from router_replay.errors import ConfigError, EngineError
from router_replay.rl.config import EngineConfig
from router_replay.rl.weights import sync as weights
from router_replay.rl.weights.fp8 import fp8_rounded
from router_replay.rl.weights.sync import WeightSync


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
    given = sync(model, tmp_path, quantize="fp8", dtype="float32").for_engine(state)
    changed = {name for name, tensor in given.items() if not torch.equal(tensor, state[name])}
    kinds = {name.split(".", 3)[-1].removesuffix(".weight") for name in changed}
    assert kinds == {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }  # fmt: skip


def test_float32_routers_reach_a_bfloat16_engine_unrounded(model: torch.nn.Module, tmp_path: pathlib.Path) -> None:
    state, routers = model.state_dict(), RouterReplay(model).router_names
    config = EngineConfig(weights=str(tmp_path), dtype="bfloat16", quantize="fp8")
    for wanted in (False, True):
        given = WeightSync(config, model, routers, float32_routers=wanted).for_engine(state)
        kept = {name for name, tensor in given.items() if tensor.dtype is torch.float32}
        assert kept == ({f"{router}.weight" for router in routers} if wanted else set())
        assert all(torch.equal(given[name], state[name]) for name in kept)


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


def test_what_is_in_useis_locked(model: torch.nn.Module, tmp_path: pathlib.Path) -> None:
    pushes = sync(model, tmp_path, kind="vllm")
    [folder] = tmp_path.iterdir()
    with share({"a": torch.zeros(3)}) as segment:
        for path in (folder, SHARED_MEMORY / segment.name):
            assert is_locked(path)
    pushes.close()
    assert not folder.exists()


def test_every_place_that_weights_are_written_to_is_swept_at_start(
    model: torch.nn.Module, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    places = [tmp_path / "configured", tmp_path / "temporary", tmp_path / "memory"]
    for place in places:
        (place / f"router-replay-{dead.pid}-at-{socket.gethostname()}-x" / "version_1").mkdir(parents=True)
        (place / f"router-replay-{dead.pid}-at-another-host-x").mkdir()  # it may be alive
    monkeypatch.setattr(tempfile, "tempdir", str(places[1]))
    monkeypatch.setattr(weights, "SHARED_MEMORY", places[2])
    pushes = sync(model, places[0])
    pushes.close()
    for place in places:
        assert [path.name for path in place.iterdir()] == [f"router-replay-{dead.pid}-at-another-host-x"]


def test_a_start_that_fails_leaves_no_folder_behind(
    model: torch.nn.Module, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.open, []

    def broken(*arguments: Any, **more: Any) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")
        return real(*arguments, **more)

    monkeypatch.setattr(weights, "sweep", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(weights.os, "open", broken)
        with pytest.raises(OSError, match="Too many open files"):
            sync(model, tmp_path)
    assert calls
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_locks_is_used_all_the_same(
    model: torch.nn.Module, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(weights.fcntl, "flock", flock)
    pushes = sync(model, tmp_path)
    assert pushes.export(model.state_dict(), 1).is_dir()
    pushes.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_that_find_no_room_are_named_with_their_folder(
    model: torch.nn.Module, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: pathlib.Path, **_: object) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError("I/O error: No space left on device")

    pushes = sync(model, tmp_path)
    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(EngineError, match=r"could not be written to .*version_1: I/O error: No space left on device"):
        pushes.export(model.state_dict(), 1)
    [root] = tmp_path.iterdir()
    assert list(root.iterdir()) == []
    pushes.close()


def test_a_place_for_weights_that_cannot_be_a_folder_is_named(model: torch.nn.Module, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"engine\.weights = .*file.* cannot be created as a folder"):
        sync(model, tmp_path / "file")
