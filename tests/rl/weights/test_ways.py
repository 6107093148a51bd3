"""The way of new weights to an engine: what is chosen, what is refused with which reason, and what is freed.

A real client talks to a server of the tests whose workers name a GPU. The memory of that GPU is here memory of the
host; tests/gpu/test_ipc_weights.py has the real one.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay.engines import EmbeddedEngine, VllmHttpEngine
from router_replay.engines.shared_memory import SHARED_MEMORY
from router_replay.engines.vllm.plugin import SIGN
from router_replay.engines.vllm.plugin.weights.sources import open_source
from router_replay.engines.vllm.weights import SharedWeights
from router_replay.errors import ConfigError, EngineError
from router_replay.rl.config import EngineConfig
from router_replay.rl.weights import shared, ways
from router_replay.rl.weights.sync import WeightSync
from tests.engines.fake_server import SPEC, FakeServer
from tests.engines.stub import Reply, serving

HERE, THERE = "GPU-here", "GPU-there"
GPU = 3


class OnGpu(SharedWeights):
    """Memory of the host that stands for memory of a GPU."""

    made: list[tuple[OnGpu, int]] = []  # noqa: RUF012

    def __init__(self, like: Mapping[str, torch.Tensor], gpu: int) -> None:
        super().__init__(like)
        self.made.append((self, gpu))


class Workers:
    """A server whose workers say on which GPU they compute, and whether they can map memory."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake, self._answer = fake, fake._workers
        self.gpus, self.refuses = [HERE], ""
        self.mapped: list[Any] = []
        fake.stub.answers |= {
            "/collective_rpc": self._reply,
            "/get_world_size": lambda _: Reply({"world_size": len(self.gpus)}),
            "/server_info": Reply({"vllm_env": {SIGN: "0.1.0"}}),
        }

    def _reply(self, body: Any) -> Reply:
        if body["method"] == "router_replay_find_weights":
            self.mapped.append(json.loads(body["kwargs"]["source"]))
            return Reply({"results": [{"reason": self.refuses}] * len(self.gpus)})
        [report] = self._answer(body).body["results"]
        return Reply({"results": [{**report, "gpu": gpu} for gpu in self.gpus]})


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(ways, "gpu_name", lambda number: {GPU: HERE}[number])
    monkeypatch.setattr(shared, "CudaWeights", OnGpu)
    monkeypatch.setattr(OnGpu, "made", [])
    with serving() as stub:
        yield Workers(FakeServer(stub))


@pytest.fixture
def model(random_model: pathlib.Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)


@pytest.fixture
def make_sync(model: Any, tmp_path: pathlib.Path) -> Iterator[Callable[..., WeightSync]]:
    with contextlib.ExitStack() as closing:

        def make(**settings: Any) -> WeightSync:
            config = EngineConfig(kind=settings.pop("kind", "vllm"), weights=str(tmp_path), **settings)
            sync = WeightSync(config, model, frozenset())
            closing.callback(sync.close)
            return sync

        yield make


def exists(memory: SharedWeights) -> bool:
    return (SHARED_MEMORY / memory.name).exists()


@pytest.mark.parametrize(("kind", "transfer"), [("vllm", "auto"), ("vllm", "cuda_ipc"), ("vllm_http", "cuda_ipc")])
def test_on_the_gpu_of_the_trainer_weights_go_by_cuda_ipc(
    workers: Workers, model: Any, make_sync: Callable[..., WeightSync], kind: str, transfer: str
) -> None:
    """One memory for all versions, which the workers map once before anything is trained."""
    workers.gpus = [HERE, HERE]
    sync, state = make_sync(kind=kind, transfer=transfer, dtype="float32"), model.state_dict()
    with VllmHttpEngine(workers.fake.url) as engine:
        assert sync.prepare([engine], state, GPU) == "by CUDA IPC"
        [(memory, gpu)] = OnGpu.made
        assert (sync.way, gpu, workers.mapped) == ("cuda_ipc", GPU, [memory.info()])
        assert sync.source(state, 1) is memory
        changed = {name: tensor + 1 for name, tensor in state.items()}
        assert sync.source(changed, 2) is memory
        read = open_source(memory.info())
        assert torch.equal(read.read("lm_head.weight"), changed["lm_head.weight"])
    assert exists(memory)
    sync.close()
    assert not exists(memory)
    assert len(OnGpu.made) == 1


def elsewhere(workers: Workers) -> None:
    workers.gpus = [HERE, THERE]


def on_a_cpu(workers: Workers) -> None:
    workers.gpus = [""]


def not_mapped(workers: Workers) -> None:
    workers.refuses = "the trainer's memory cannot be opened by CUDA IPC: no"


@pytest.mark.parametrize(
    ("happens", "gpu", "reason"),
    [
        (elsewhere, GPU, "the trainer computes on GPU-here, and a worker of the engine on GPU-there"),
        (on_a_cpu, GPU, "the trainer computes on GPU-here, and a worker of the engine on a CPU"),
        (not_mapped, GPU, "the trainer's memory cannot be opened by CUDA IPC: no"),
        (elsewhere, None, "the trainer computes on a CPU"),
    ],
)
def test_where_cuda_ipc_is_not_possible_another_way_is_taken_unless_it_was_asked_for(
    workers: Workers, model: Any, make_sync: Callable[..., WeightSync], happens: Any, gpu: int | None, reason: str
) -> None:
    happens(workers)
    asked, auto, state = make_sync(transfer="cuda_ipc"), make_sync(), model.state_dict()
    with VllmHttpEngine(workers.fake.url) as engine:
        with pytest.raises(ConfigError, match=rf'transfer = "cuda_ipc" is not possible: {reason}.*Set it to "auto"'):
            asked.prepare([engine], state, gpu)
        told = f" (not by CUDA IPC: {reason})" if gpu is not None else ""
        assert auto.prepare([engine], state, gpu) == f"by shared memory{told}"
    assert auto.way == "shared_memory"
    assert type(auto.source(state, 1)) is SharedWeights
    assert not any(exists(memory) for memory, _ in OnGpu.made)  # what could not be used is freed


def test_a_gpu_without_room_is_a_reason(
    workers: Workers, model: Any, make_sync: Callable[..., WeightSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "9 MiB of the memory of GPU-here cannot be shared: out of memory"

    def full(like: Any, gpu: int) -> None:
        raise EngineError(reason)

    monkeypatch.setattr(shared, "CudaWeights", full)
    with VllmHttpEngine(workers.fake.url) as engine:
        words = make_sync().prepare([engine], model.state_dict(), GPU)
        assert words == f"by shared memory (not by CUDA IPC: {reason})"
        with pytest.raises(ConfigError, match="out of memory"):
            make_sync(transfer="cuda_ipc").prepare([engine], model.state_dict(), GPU)


def test_a_server_without_the_plugin_maps_nothing(
    workers: Workers, model: Any, make_sync: Callable[..., WeightSync]
) -> None:
    workers.fake.run_freely()
    workers.fake.stub.answers["/collective_rpc"] = Reply({"error": {"message": "no such method"}}, 500)
    sync = make_sync(kind="vllm_http", transfer="cuda_ipc")
    with VllmHttpEngine(workers.fake.url, spec=SPEC) as engine, pytest.raises(ConfigError, match="without the plugin"):
        sync.prepare([engine], model.state_dict(), GPU)


def test_other_engines_get_what_they_got(
    workers: Workers, model: Any, random_model: pathlib.Path, make_sync: Callable[..., WeightSync]
) -> None:
    """A server gets a folder even on the trainer's GPU, unless its owner says that it can map the memory."""
    state = model.state_dict()
    with VllmHttpEngine(workers.fake.url) as server, EmbeddedEngine(random_model) as embedded:
        assert make_sync(kind="vllm_http").prepare([server], state, GPU) == "as a folder"
        assert make_sync(kind="embedded").prepare([embedded], state, GPU) == "as tensors"
        with pytest.raises(ConfigError, match="EmbeddedEngine does not take weights by CUDA IPC"):
            make_sync(kind="vllm_http", transfer="cuda_ipc").prepare([server, embedded], state, GPU)
    assert OnGpu.made == []


@pytest.mark.parametrize("kind", ["vllm", "embedded"])
def test_a_folder_can_be_asked_for(
    workers: Workers, model: Any, make_sync: Callable[..., WeightSync], kind: str
) -> None:
    sync, state = make_sync(kind=kind, transfer="folder"), model.state_dict()
    with VllmHttpEngine(workers.fake.url) as engine:
        assert sync.prepare([engine], state, GPU) == "as a folder"
    source = sync.source(state, 4)
    assert isinstance(source, str)
    assert pathlib.Path(source, "config.json").is_file()
    assert OnGpu.made == []


def test_shared_memory_without_room_is_a_reason(
    workers: Workers, model: Any, make_sync: Callable[..., WeightSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(like: Any) -> None:
        raise EngineError("9 MiB of shared memory could not be allocated")

    monkeypatch.setattr(shared, "SharedWeights", full)
    state, auto = model.state_dict(), make_sync()
    with VllmHttpEngine(workers.fake.url) as engine:
        words = auto.prepare([engine], state, None)
        with pytest.raises(ConfigError, match=r'transfer = "shared_memory" is not possible: 9 MiB of shared memory'):
            make_sync(transfer="shared_memory").prepare([engine], state, None)
    assert words == "as a folder (not by shared memory: 9 MiB of shared memory could not be allocated)"
    assert isinstance(auto.source(state, 1), str)
