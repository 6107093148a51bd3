"""New weights for a stock server by vLLM's own transfers: what is refused, how parts are packed, what fails loudly.

The GPU is the only thing that is missing here, so the buffer of these tests is in host memory. `tests/gpu` has the
real transfer into a real server.
"""

from __future__ import annotations

import asyncio
import base64
import pathlib
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from router_replay import wire
from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.vllm import transfer
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.stock import read_stock
from router_replay.engines.vllm.transfer import CudaIpc, opened, parts_of
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.conftest import ENVIRONMENT, GREEDY, Checkpoints, Server, one, prompt, same, start_server
from tests.engines.stub import Reply, Stub, eventually, serving
from tests.makers import random_routes

pytest.importorskip("aiohttp")
SPEC = RouterSpec(16, 4, (1, 2, 3), num_layers=4)
GPU, UUID = "cuda", "GPU-1"
CALLS = {
    "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/reset_prefix_cache", "/inference/v1/generate",
}  # fmt: skip


def server_info(device: Any = GPU, backend: str | None = "ipc", insecure: bool = True, **parts: Any) -> dict[str, Any]:
    """What a server in development mode says of itself, in the form of vLLM 0.30."""
    config = {
        "device_config": {"device": device},
        "weight_transfer_config": backend and {"backend": backend},
        "parallel_config": {"world_size": 1, "data_parallel_size": 1},
        "model_config": {"quantization": None},
    }
    return {"vllm_config": config | parts, "vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": insecure}}


@pytest.mark.parametrize(
    ("info", "version", "reason"),
    [
        ({}, (0, 32), "does not say on which device"),
        (server_info("cpu"), (0, 32), "computes on a CPU, where vLLM's own weight updates report success"),
        (server_info("xpu"), (0, 32), "'xpu'"),
        (server_info(device=None), (0, 32), "does not say on which device"),
        (server_info(), (0, 27), "before vLLM 0.28"),
        (server_info(backend=None), (0, 32), "backend is none: start it with --weight-transfer-config"),
        (server_info(backend="sparse_nccl"), (0, 32), "backend is 'sparse_nccl'"),
        (server_info(insecure=False), (0, 32), "only with VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
        (server_info(model_config={"quantization": "fp8"}), (0, 32), "quantizes its weights (fp8)"),
        (server_info(parallel_config={"world_size": 2, "data_parallel_size": 2}), (0, 32), "has 4 workers"),
        ({"vllm_config": [], "vllm_env": 3}, (0, 32), "does not say on which device"),
    ],
)
def test_why_a_server_takes_no_weights(info: dict[str, Any], version: tuple[int, int], reason: str) -> None:
    assert reason in read_stock(info, version, None, 0).why_not


def test_a_server_with_several_workers_takes_weights_by_nccl_without_pickles() -> None:
    parallel = {"world_size": 4, "data_parallel_size": 2}
    stock = read_stock(server_info(backend="nccl", insecure=False, parallel_config=parallel), (0, 28), None, 3)
    assert (stock.why_not, stock.backend, stock.ranks, stock.gpu) == ("", "nccl", 8, 3)


# -- parts --------------------------------------------------------------------------------------------


def mixed() -> dict[str, torch.Tensor]:
    """Tensors of several number types, odd sizes and layouts, in an order in which they would not be aligned."""
    rng = torch.Generator().manual_seed(0)
    return {
        "bytes": torch.arange(3, dtype=torch.int8),
        "odd": torch.randn(5, 3, generator=rng).bfloat16(),
        "router": torch.randn(4, 3, generator=rng),
        "turned": torch.randn(6, 2, generator=rng).bfloat16().T,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "large": torch.randn(50, generator=rng).double(),
        "last": torch.randn(7, generator=rng).half(),
    }


def test_parts_have_every_name_once_and_fit_the_buffer() -> None:
    index = opened(mixed()).index
    assert len(parts_of(index, 10_000)) == 1
    for limit in (1, 30, 64, 100, 10_000):
        parts = parts_of(index, limit)
        assert [name for part in parts for name in part] == list(index)
        for part in parts:
            size = sum(transfer.size_of(*index[name]) for name in part)
            assert size <= limit or [name for name in part if transfer.size_of(*index[name])] == part[:1]


class InHostMemory(CudaIpc):
    """A sender whose buffer is in host memory; `received` keeps what vLLM's own reader makes of each part."""

    def __init__(self, http: Any, gpu: int) -> None:
        super().__init__(http, gpu)
        self.received: dict[str, torch.Tensor] = {}
        self.parts: list[list[str]] = []

    def _allocate(self, largest: int) -> None:
        self._buffer = torch.full((max(transfer.BUFFER, largest),), 255, dtype=torch.uint8)
        self._handles = base64.b64encode(pickle.dumps({UUID: (None,) * 7})).decode()

    def _synchronize(self) -> None:
        pass

    def _free(self) -> None:
        del self._buffer

    async def _post(self, path: str, body: Any = None) -> None:
        await super()._post(path, body)
        if path == "/update_weights":
            self._read(body["update_info"])

    def _read(self, update_info: dict[str, Any]) -> None:
        """Read a part with vLLM's own code. The server copies it before it answers."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

        told = IPCWeightTransferUpdateInfo(**update_info)
        self.parts.append(told.names)
        mapped = SimpleNamespace(rebuild=lambda arguments: self._buffer)
        read = packed_ipc_consumer(
            told.ipc_handles, told.names, told.shapes, told.dtype_names, told.tensor_sizes, 0, importer=mapped
        )
        self.received |= dict(read)


@pytest.fixture
def in_host_memory(monkeypatch: pytest.MonkeyPatch) -> list[InHostMemory]:
    """The senders that engines make from now on, with room for 64 bytes."""
    made: list[InHostMemory] = []

    def sender(backend: str, http: Any, gpu: int, ranks: int) -> InHostMemory:
        assert (backend, ranks) == ("ipc", 1)
        made.append(InHostMemory(http, gpu))
        return made[-1]

    monkeypatch.setattr(transfer, "sender", sender)
    monkeypatch.setattr(transfer, "BUFFER", 64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    return made


# -- a server that answers as a stock one on a GPU ----------------------------------------------------


class Gpu:
    """What the stub says: each update gives other log-probs, as new weights do."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.logprob, self.moves, self.seconds = stub, -0.5, True, 0.0
        ok = Reply({"message": "ok"})
        stub.answers |= {
            "/version": Reply({"version": "0.32.0"}),
            "/server_info": Reply(server_info()),
            "/is_paused": Reply({"is_paused": False}),
            "/collective_rpc": Reply({"error": {"message": "no such method"}}, 500),
            "/abort_requests": ok, "/pause": ok, "/resume": ok, "/init_weight_transfer_engine": ok,
            "/start_weight_update": ok, "/update_weights": ok, "/finish_weight_update": self._finish,
            "/reset_prefix_cache": Reply({"success": True}), "/inference/v1/generate": self._generate,
        }  # fmt: skip

    def _finish(self, body: Any) -> Reply:
        self.logprob -= 0.25 * self.moves
        return Reply({"message": "Weight update finished"})

    def _generate(self, body: Any) -> Reply:
        if not body or "token_ids" not in body:
            return Reply({"error": "no"}, 400)
        tokens = body["sampling_params"]["max_tokens"]
        rows = random_routes(len(body["token_ids"]) + tokens - 1, SPEC)
        content = [{"token": "x", "logprob": self.logprob}] * tokens
        choice = {"index": 0, "token_ids": [5] * tokens, "finish_reason": "length", "logprobs": {"content": content}}
        return Reply({"choices": [choice | {"routed_experts": wire.to_vllm(rows)}]}, seconds=self.seconds)

    @property
    def calls(self) -> list[str]:
        return [path for path, _ in self.stub.asked if path in CALLS]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with serving() as stub:
        yield Gpu(stub)


@pytest.fixture
def engine(gpu: Gpu, in_host_memory: list[InHostMemory]) -> Iterator[Engine]:
    pytest.importorskip("vllm", reason="vLLM's own code reads the parts")
    with VllmHttpEngine(gpu.stub.url, spec=SPEC) as engine:
        gpu.stub.asked.clear()
        yield engine


def generate(engine: Engine) -> Any:
    return one(engine, Request((7, 8), Sampling(max_tokens=2)))


def test_what_such_a_server_can_do(engine: Engine) -> None:
    can = engine.capabilities
    assert (can.routes, can.forced_routes, can.versions, can.checked_weights) == (True, False, True, False)
    assert "forced routes, checked weights and requests that are kept over a weight change need the plugin" in (
        can.why_not
    )


def test_vllm_reads_the_tensors_that_were_sent(engine: Engine, in_host_memory: list[InHostMemory]) -> None:
    engine.update_weights(mixed(), 1)
    [sender] = in_host_memory
    assert len(sender.parts) > 3
    assert sender.received.keys() == mixed().keys()
    for name, tensor in mixed().items():
        assert sender.received[name].dtype == tensor.dtype
        assert torch.equal(sender.received[name], tensor.reshape(tensor.shape or (1,)))
    assert generate(engine).versions.tolist() == [1, 1]


def test_a_folder_is_sent_as_its_tensors(
    engine: Engine, in_host_memory: list[InHostMemory], tmp_path: pathlib.Path
) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in mixed().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    engine.update_weights(tmp_path, 4)
    received = in_host_memory[0].received
    assert all(torch.equal(received[name], tensor.reshape(tensor.shape or (1,))) for name, tensor in tensors.items())
    assert engine.version == 4


def test_the_calls_of_an_update_in_their_order(engine: Engine, gpu: Gpu, in_host_memory: list[InHostMemory]) -> None:
    engine.update_weights(mixed(), 1)
    parts = len(in_host_memory[0].parts)
    assert gpu.calls == [
        "/pause", "/init_weight_transfer_engine", "/start_weight_update", *["/update_weights"] * parts,
        "/finish_weight_update", "/reset_prefix_cache", "/resume", "/inference/v1/generate", "/pause", "/resume",
    ]  # fmt: skip
    assert gpu.stub.bodies("/init_weight_transfer_engine") == [{"init_info": {"packed": True}}]


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_transfer_that_fails_half_way_ends_the_engine(engine: Engine, gpu: Gpu, path: str) -> None:
    gpu.stub.answers[path] = Reply({"error": {"message": "IPC handle not found for GPU UUID GPU-2"}}, 500)
    with pytest.raises(EngineError, match=r"unknown which weights vLLM has.*GPU-2.*Restart vLLM"):
        engine.update_weights(mixed(), 1)
    with pytest.raises(EngineError, match="unknown which weights"):
        generate(engine)
    assert engine.version == 0
    assert gpu.calls[-1] == "/resume"  # for others


def test_a_transfer_that_cannot_begin_changes_nothing(engine: Engine, gpu: Gpu) -> None:
    gpu.stub.answers["/init_weight_transfer_engine"] = Reply({"error": {"message": "no backend"}}, 500)
    with pytest.raises(EngineError, match=r"old ones are still in use.*no backend"):
        engine.update_weights(mixed(), 1)
    assert "/start_weight_update" not in gpu.calls
    assert generate(engine).versions.tolist() == [0, 0]


def test_a_cache_that_is_not_reset_ends_the_engine(engine: Engine, gpu: Gpu) -> None:
    gpu.stub.answers["/reset_prefix_cache"] = Reply({"success": False})
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        engine.update_weights(mixed(), 1)


def test_a_server_that_answers_as_before_although_the_weights_changed(engine: Engine, gpu: Gpu) -> None:
    engine.update_weights(mixed(), 1)
    gpu.moves = False
    engine.update_weights(mixed(), 2)  # the same weights give the same answer
    few = mixed() | {"odd": mixed()["odd"] + 1}
    engine.update_weights(few, 3)  # nor must a few tensors change an answer
    with pytest.raises(EngineError, match=r"7 of 8 tensors changed, but vLLM answers a prompt as before, to the bit"):
        engine.update_weights({name: tensor + 3 for name, tensor in mixed().items()}, 4)


def test_weights_that_make_no_probabilities_end_the_engine(engine: Engine, gpu: Gpu) -> None:
    gpu.logprob = -9999.0
    with pytest.raises(EngineError, match="samples tokens whose log-probs are"):
        engine.update_weights(mixed(), 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("odd"), "got 7 in the given tensors; 1 not in them: odd"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "1 in them alone: more"),
        (lambda tensors: tensors.update(odd=torch.zeros(3, 5)), r"odd .*has shape \[3, 5\], expected \[5, 3\]"),
        (lambda tensors: tensors.update(odd=[1.0]), "odd: expected a whole torch tensor, got list"),
        (lambda tensors: tensors.clear(), "there are no weights"),
    ],
)
@pytest.mark.parametrize("known_by", ["folder", "update"])
def test_another_layout_is_refused_before_anything_changes(
    gpu: Gpu, in_host_memory: list[InHostMemory], tmp_path: pathlib.Path, known_by: str, change: Any, reason: str
) -> None:
    """The layout is that of the server's folder, if it is on this machine, or else that of the first update."""
    pytest.importorskip("vllm", reason="vLLM's own code reads the parts")
    draft = {"model.layers.4.mtp": torch.zeros(2)}  # after the last layer: no policy has it
    save_file({name: tensor.contiguous() for name, tensor in (mixed() | draft).items()}, tmp_path / "m.safetensors")
    if known_by == "folder":
        gpu.stub.answers["/v1/models"] = Reply({"data": [{"id": "moe", "root": str(tmp_path)}]})
    with VllmHttpEngine(gpu.stub.url, spec=SPEC) as engine:
        engine.update_weights(mixed(), 1)
        gpu.stub.asked.clear()
        tensors = mixed()
        change(tensors)
        with pytest.raises(EngineError, match=reason):
            engine.update_weights(tensors, 2)
        assert gpu.calls == []
        assert engine.version == 1


def test_without_a_gpu_here_nothing_is_sent(gpu: Gpu) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with VllmHttpEngine(gpu.stub.url, spec=SPEC) as engine:
        gpu.stub.asked.clear()
        with pytest.raises(EngineError, match="torch finds no CUDA GPU in this process"):
            engine.update_weights(mixed(), 1)
        assert gpu.calls == []


def test_no_request_is_kept_over_a_weight_change(engine: Engine, gpu: Gpu) -> None:
    """The server does not say which of its tokens would be whose."""
    gpu.seconds = 3.0

    async def work() -> None:
        task = asyncio.create_task(engine.submit(Request((7, 8), Sampling(max_tokens=2))))
        await asyncio.to_thread(eventually, lambda: "/inference/v1/generate" in gpu.calls)
        gpu.seconds = 0.0
        with pytest.raises(EngineError, match="in_flight='keep' would mix two policies"):
            await asyncio.to_thread(engine.update_weights, mixed(), 1, "keep")
        assert "/start_weight_update" not in gpu.calls
        [completion] = await task
        assert completion.versions.tolist() == [0, 0]

    asyncio.run(work())


# -- a real server, on the CPU ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_ipc(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stock server that is set up for transfers, as a user would do it on a GPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    log = tmp_path_factory.mktemp("ipc") / "log"
    arguments = ("--weight-transfer-config", '{"backend": "ipc"}')
    variables = {**ENVIRONMENT, "ROUTER_REPLAY_VLLM": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    server = start_server(checkpoints.a, log, *arguments, **variables)
    yield server
    server.kill()


def test_a_real_server_on_a_cpu_is_refused_with_the_reason(with_ipc: Server, checkpoints: Checkpoints) -> None:
    with with_ipc.wait(lambda: VllmHttpEngine(with_ipc.url), 600) as engine:
        assert not engine.capabilities.versions
        assert "the server computes on a CPU" in engine.capabilities.why_not
        before = one(engine, Request(prompt(), GREEDY))
        with pytest.raises(EngineError, match=r"need the plugin.*computes on a CPU.*give wrong experts"):
            engine.update_weights(checkpoints.b, 1)
        assert same(before, one(engine, Request(prompt(), GREEDY)))


def test_a_real_server_takes_the_calls_and_says_why_a_part_fails(
    with_ipc: Server, checkpoints: Checkpoints, in_host_memory: list[InHostMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the part and its pickled handle, and then finds no GPU. Its answer must reach the caller."""
    monkeypatch.setattr("router_replay.engines.vllm.stock._why_not", lambda *_: "")
    monkeypatch.setattr(transfer, "BUFFER", 1 << 16)
    with with_ipc.wait(lambda: VllmHttpEngine(with_ipc.url), 600) as engine:
        with pytest.raises(EngineError, match=r"unknown which weights vLLM has.*CUDA.*Restart vLLM"):
            engine.update_weights(checkpoints.b, 1)
        with pytest.raises(EngineError, match="unknown which weights"):
            one(engine, Request(prompt(), GREEDY))
