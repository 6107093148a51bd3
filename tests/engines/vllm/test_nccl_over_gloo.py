"""New weights for a stock vLLM server with two workers, by its transfer backend "nccl", with gloo in NCCL's place.

Everything but the transport is real: the server and its workers, vLLM's trainer side, and our client. NCCL itself needs
GPUs: tests/gpu/test_stock_weights.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from router_replay.engines import Completion, Request
from router_replay.engines.vllm import stock, transfer
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.errors import EngineError
from tests.engines.conftest import GREEDY, Checkpoints, Server, Trainer, one, prompt, same, start_server

ROOT = pathlib.Path(__file__).parents[3]
TWO_WORKERS = (
    "--tensor-parallel-size=2",
    "--worker-extension-cls=tests.engines.vllm.gloo_for_nccl.OverGloo",
    "--weight-transfer-config",
    json.dumps({"backend": "nccl"}),
)
PART = 64 << 10  # bytes of weights in one broadcast; the model has several of them


class OverGloo(transfer.Nccl):
    """Sends tensors of this host."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._device = torch.device("cpu")

    def _synchronize(self) -> None:
        pass

    def _current_device(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = tmp_path_factory.mktemp("nccl") / "log"
    started = start_server(
        checkpoints.a, log, *TWO_WORKERS, ROUTER_REPLAY_VLLM="0", ROUTER_REPLAY_TEST_WORKER="1", PYTHONPATH=path
    )
    yield started
    started.kill()


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmHttpEngine]:
    from tests.engines.vllm import gloo_for_nccl

    for replaced in gloo_for_nccl.parts():
        monkeypatch.setattr(*replaced)
    monkeypatch.setattr(transfer, "BUFFER", PART)
    monkeypatch.setattr(transfer, "sender", lambda backend, http, gpu, ranks: OverGloo(http, gpu, ranks))
    monkeypatch.setattr(stock, "_why_not", lambda *_: "")  # otherwise a server on a CPU is refused
    with server.wait(lambda: VllmHttpEngine(server.url, timeout=300), 600) as connected:
        assert isinstance(connected, VllmHttpEngine)
        yield connected


def test_both_workers_get_their_share_of_every_version(
    engine: VllmHttpEngine, checkpoints: Checkpoints, trainer: Trainer
) -> None:
    def ask() -> Completion:
        return one(engine, Request(prompt(), GREEDY))

    def gap(checkpoint: str, completion: Completion) -> float:
        return float(np.max(trainer.gap(checkpoint, prompt(), completion, completion.routes)))

    first = ask()
    assert gap(checkpoints.a, first) < 1e-4 < gap(checkpoints.b, first)
    tensors = load_file(f"{checkpoints.b}/model.safetensors")
    assert len(transfer.parts_of(transfer.opened(tensors).index, PART)) > 4
    engine.update_weights(tensors, 1)
    second = ask()
    assert set(second.versions.tolist()) == {1}
    assert gap(checkpoints.b, second) < 1e-4 < gap(checkpoints.a, second)
    engine.update_weights(checkpoints.a, 2)  # the group of the first update is used again
    assert same(ask(), first)

    missing = {name: tensor for name, tensor in tensors.items() if not name.endswith("norm.weight")}
    with pytest.raises(EngineError, match="not in them"):
        engine.update_weights(missing, 3)
    assert same(ask(), first)
