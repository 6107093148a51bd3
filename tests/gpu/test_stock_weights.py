"""Test new weights for a stock vLLM server, without the plugin, by vLLM's own transfers on the GPU.

By CUDA IPC, on the GPU of the trainer. By NCCL only where the server has a GPU of its own, or where one GPU may have
two ranks: NCCL 2.30 or later (VLLM_NCCL_SO_PATH names its library) with NCCL_MULTI_RANK_GPU_ENABLE=1.

With --device cpu the server is refused with the reason, and the rest is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from router_replay.engines import Request
from router_replay.engines.vllm import transfer
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.serve import MODULE
from router_replay.engines.vllm.versions import installed_version, model_runner, numbers_of
from router_replay.engines.vllm.weights import checkpoint_tensors
from router_replay.errors import EngineError
from router_replay.rl.engine_start import CPU_ENVIRONMENT
from tests.gpu.conftest import SAMPLING, Trainer, prompts

SECONDS = 400  # for the start of the server
TWO_RANKS_ON_ONE_GPU = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def say(text: str) -> None:
    print(text)  # noqa: T201  shown with -s, and where a test fails


def command_of(folder: pathlib.Path, port: int, device: str, backend: str) -> list[str]:
    command = [sys.executable, "-m", MODULE, "--model", str(folder), "--host=127.0.0.1", f"--port={port}"]
    command += ["--dtype=bfloat16", "--max-model-len=256", "--max-num-seqs=16", "--skip-tokenizer-init"]
    command += ["--enable-return-routed-experts", "--logprobs-mode=processed_logprobs"]
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if numbers_of(installed_version()) >= (0, 30):
        command.append("--enable-scale-out")
    if device == "cuda":  # with CUDA graphs, which must see the new weights
        command += ["--gpu-memory-utilization=0.2", f"--kv-cache-memory-bytes={1 << 30}"]
        return [*command, "--cudagraph-capture-sizes", "1", "2", "4", "8", "16"]
    return [*command, "--enforce-eager", "--block-size=32"]


@pytest.fixture(params=["ipc", "nccl"])
def stock(
    request: pytest.FixtureRequest, device: str, folders: list[pathlib.Path], tmp_path: pathlib.Path
) -> Iterator[Any]:
    """An engine that is connected to a server of its own, with the first checkpoint and this transfer backend."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    backend: str = request.param
    variables = {
        **os.environ, **model_runner(installed_version()), "VLLM_PLUGINS": "", "ROUTER_REPLAY_VLLM": "0",
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    variables.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its kernels are compiled, and not every machine can
    if device == "cpu" and backend == "nccl":
        pytest.skip("a server on a CPU is refused with any backend")
    elif device == "cpu":
        variables |= CPU_ENVIRONMENT
    elif backend == "nccl" and torch.cuda.device_count() > 1:
        variables["CUDA_VISIBLE_DEVICES"] = "1"
    elif backend == "nccl" and not TWO_RANKS_ON_ONE_GPU:
        pytest.skip("NCCL needs a second GPU, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    command = command_of(folders[0], port, device, backend)
    say("\n" + " ".join(command))
    server = subprocess.Popen(
        command, env=variables, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        with connected(server, f"http://127.0.0.1:{port}", log) as engine:
            yield engine
    except BaseException:
        say(f"-- the end of the server's log --\n{log.read_text(errors='replace')[-6000:]}")
        raise
    finally:
        say(f"-- errors and warnings of the server --\n{complaints(log)}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # server, engine core and worker
        server.wait()


def connected(server: subprocess.Popen[bytes], url: str, log: pathlib.Path) -> VllmHttpEngine:
    began = time.monotonic()
    while True:
        try:
            engine = VllmHttpEngine(url, timeout=300)
        except EngineError as error:
            late = time.monotonic() - began > SECONDS
            if "no vLLM server" not in str(error) or server.poll() is not None or late:
                raise EngineError(f"{error} (after {time.monotonic() - began:.0f} s, exit {server.poll()})") from error
            time.sleep(0.5)
        else:
            say(f"the server started in {time.monotonic() - began:.0f} s; {engine.capabilities}")
            return engine


def complaints(log: pathlib.Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line[:300] for line in lines if "ERROR" in line or "WARNING" in line or "Error" in line][-60:])


def test_a_stock_server_computes_with_the_weights_that_were_sent(
    stock: Any, trainer: Trainer, new_trainer: Trainer, folders: list[pathlib.Path], device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """To the second checkpoint by tensors on the GPU, back by a folder, and to the second with routers in float32."""
    can, requests = stock.capabilities, [Request(tokens, SAMPLING) for tokens in prompts(16, 60, seed=3)]
    assert (can.routes, can.forced_routes, can.checked_weights) == (True, False, False)
    if device == "cpu":
        assert not can.versions
        with pytest.raises(EngineError, match=r"computes on a CPU.*give wrong experts"):
            stock.update_weights(folders[1], 1)
        pytest.skip("a stock server on a CPU takes no new weights")
    assert can.versions, can.why_not
    assert "forced routes, checked weights and requests that are kept" in can.why_not
    monkeypatch.setattr(transfer, "BUFFER", 8 << 20)  # bytes; the model has 50 MB, so it travels in several parts

    def check(what: str, right: Trainer, wrong: Trainer, version: int) -> None:
        done = stock.generate(requests)
        gap, other = right.gap(requests, done), wrong.gap(requests, done)
        say(f"{what}: k3 {gap:.3g} to the weights it should have, {other:.3g} to the others")
        assert {int(number) for one in done for number in one.versions} == {version}
        assert all(one.routes.captured.all() for one in done)
        assert gap < 0.01 * other

    def update(source: Any, version: int) -> None:
        began = time.monotonic()
        stock.update_weights(source, version)
        say(f"update to version {version}: {time.monotonic() - began:.2f} s")

    check("at the start", trainer, new_trainer, 0)
    tensors = checkpoint_tensors(new_trainer.model)
    assert len(transfer.parts_of(transfer.opened(tensors).index, 8 << 20)) > 3
    update(tensors, 1)
    check("after tensors", new_trainer, trainer, 1)
    update(str(folders[0]), 2)
    check("after a folder", trainer, new_trainer, 2)

    fewer = {name: tensor for name, tensor in tensors.items() if ".layers.3.mlp.experts.5.up_proj" not in name}
    assert len(fewer) == len(tensors) - 1
    with pytest.raises(EngineError, match=r"1 not in them: model\.layers\.3\.mlp\.experts\.5\.up_proj"):
        stock.update_weights(fewer, 3)
    check("after a refusal", trainer, new_trainer, 2)

    update({name: tensor.float() if ".mlp.gate." in name else tensor for name, tensor in tensors.items()}, 3)
    check("after routers in float32", new_trainer, trainer, 3)
