"""Real engines for the tests, one of each for the whole session, on two tiny checkpoints A and B.

The model is a GLM-4 MoE: sigmoid scores with a selection bias, grouped top-k, a scaling factor, a shared expert
and a dense first layer, so that whatever is wrong with a rule, a layer id or a reloaded bias shows. In float32, what
should be equal to the bit is. vLLM takes half a minute to start, so all servers start at once, at the first need.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.errors import EngineError
from router_replay.routes import Routes

Sampled = Callable[[], float]  # how many tokens an engine has sampled since its start
VOCABULARY = 128
PROMPT_TOKENS = 70  # two blocks and a bit, and more than one chunk
GREEDY = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=150, ignore_eos=True)
# Short blocks for prefix hits, small chunks for chunked prefill, few blocks for preemption.
SHAPE = {
    "dtype": "float32", "max_model_len": 256, "block_size": 32, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 24, "enforce_eager": True,
}  # fmt: skip
MODULAR_ON_CPUS = (0, 30)  # the first vLLM whose CPU kernel does not choose the experts itself
# For vLLM's processes only: the compile tests of this session need a torch that compiles.
OWN_WORKER = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
# An engine core with one worker runs the model itself, as `router-replay train` lets it and as on a GPU. By default,
# vLLM's CPU build starts a process for the worker, which doubles the work of a start.
ENVIRONMENT = {**OWN_WORKER, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def prompt(seed: int = 0, tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCABULARY, tokens).tolist())


def one(engine: Engine, request: Request) -> Completion:
    [completion] = engine.generate([request])
    return completion


def same(a: Completion, b: Completion) -> bool:
    """Equal to the bit: tokens, log-probs, rows."""
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and bool(a.routes.same_sets(b.routes))
    )


def seconds_to_eight_tokens(engine: Engine, requests: Sequence[Request]) -> float:
    short = [
        Request(prompt(900 + number, len(request.token_ids)), dataclasses.replace(request.sampling, max_tokens=8))
        for number, request in enumerate(requests)
    ]
    started = time.monotonic()
    engine.generate(short)
    return time.monotonic() - started


async def midway(
    engine: Engine,
    requests: Sequence[Request],
    act: Callable[[], object],
    undo: Callable[[], object] = lambda: None,
    too_late: Callable[[list[list[Completion]]], bool] = lambda landed: False,
    sampled: Sampled | None = None,
) -> list[list[Completion]]:
    """Start requests, call `act` in another thread when each has some tokens, and return what came of them.

    `sampled` says how many tokens the engine has sampled. Without it, some time passes instead, which other requests of
    this size measure first. One request may have fewer tokens than another, and a machine may be slow: where it was too
    early or too late, the whole is done again. `too_late` says of what came that requests ended before `act` reached
    them.
    """
    seconds, tokens = 0.1, 6.0 * sum(request.sampling.n for request in requests)
    if sampled is None:
        seconds = max(seconds, await asyncio.to_thread(seconds_to_eight_tokens, engine, requests))
    for _ in range(14):
        before = 0.0 if sampled is None else await asyncio.to_thread(sampled)
        tasks = [asyncio.create_task(engine.submit(request)) for request in requests]
        if sampled is None:
            await asyncio.sleep(seconds)
        else:
            await until_sampled(sampled, before + tokens, tasks)
        late = any(task.done() for task in tasks)
        await asyncio.to_thread(act)
        landed = [await task for task in tasks]
        samples = [sample for samples in landed for sample in samples]
        late = late or too_late(landed)
        if not late and all(len(sample.token_ids) > 3 and sample.versions[3] == 0 for sample in samples):
            return landed
        await asyncio.to_thread(undo)
        seconds, tokens = (amount * (0.6 if late else 2) for amount in (seconds, tokens))
    raise AssertionError("never had all requests some tokens, and none all of them")


def ended_before(landed: list[list[Completion]]) -> bool:
    """For `too_late` of a swap that keeps requests: one of them ended before the weights changed."""
    return any(bool((sample.versions == 0).all()) for samples in landed for sample in samples)


def not_aborted(landed: list[list[Completion]]) -> bool:
    """For `too_late` of an abort: a sample ended by itself before the abort reached it."""
    return any(sample.finish_reason != "abort" for samples in landed for sample in samples)


async def until_sampled(sampled: Sampled, tokens: float, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Return when the engine has sampled this many tokens, or when one of its tasks has ended."""
    while not any(task.done() for task in tasks) and await asyncio.to_thread(sampled) < tokens:
        await asyncio.sleep(0.01)


@pytest.fixture
def sampled() -> Sampled | None:
    """The counter for `midway`. The engines here have none that a test could read."""
    return None


# -- checkpoints --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    a: str
    b: str


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate("ab"):
        save_model(folder / name, seed)
    return Checkpoints(str(folder / "a"), str(folder / "b"))


def save_model(folder: pathlib.Path, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, n_routed_experts=16, num_experts_per_tok=4,
        n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=1.5, max_position_embeddings=512, eos_token_id=1, bos_token_id=0, pad_token_id=2,
        tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", chat_template=template).save_pretrained(folder)


# -- servers ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: pathlib.Path

    def wait(self, connect: Callable[[], Engine], seconds: float = 900) -> Engine:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return connect()
            except EngineError as error:
                if "no vLLM server" not in str(error) or self.process.poll() is not None:
                    raise EngineError(f"{error}\n{self.log.read_text()[-3000:]}") from error
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the group we started: server, engine core, worker
        self.process.wait()


def running(server: Server) -> float:
    """How many requests a server runs, over all its ranks."""
    return sum(metric(server, "vllm:num_requests_running{"))


async def dropped(engine: Engine, server: Server, requests: Sequence[Request]) -> list[list[Completion]]:
    """Start requests, abort them while the server runs them all, and return what came of them.

    The requests may be through before the server's metrics say that they run, or before the abort reaches them: then
    the whole is done again.
    """
    for _ in range(50):
        while await asyncio.to_thread(running, server):
            await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(engine.submit(request)) for request in requests]
        while await asyncio.to_thread(running, server) < len(requests) and not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        aborted = await asyncio.to_thread(engine.abort)
        landed = [await task for task in tasks]
        if not not_aborted(landed):
            assert sorted(one.request_id for one in aborted) == sorted(one.request_id for [one] in landed)
            return landed
    raise AssertionError("never did the abort reach all requests")


def metric(server: Server, start: str) -> list[float]:
    """The values of the server's own metrics whose line starts with this."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(start)]


KEY = "key-of-our-server"


@dataclasses.dataclass
class Servers:
    ours: Server  # by router-replay serve, on checkpoint B, with a key
    plain: Server  # a user's own: development mode, no plugin


@pytest.fixture(scope="session")
def servers(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folder = tmp_path_factory.mktemp("servers")
    ours = start_server(checkpoints.b, folder / "ours.log", ROUTER_REPLAY_API_KEY=KEY, VLLM_LOGGING_LEVEL="WARNING")
    plain = start_server(checkpoints.a, folder / "plain.log", ROUTER_REPLAY_VLLM="0")
    yield Servers(ours, plain)
    ours.kill()
    plain.kill()


def start_server(model: str, log: pathlib.Path, *more: str, **variables: str) -> Server:
    """Start a server as router-replay serve does, with these environment variables and more arguments."""
    from router_replay.engines.vllm.serve import server_command

    with environment(**{**ENVIRONMENT, **variables}):
        command, variables_of_server = server_command(model, more)
    return start_command(command, log, variables_of_server)


def start_command(command: Sequence[str], log: pathlib.Path, variables: Mapping[str, str]) -> Server:
    """Start a vLLM server by this command on a free port, in the shape of the tests and with this environment."""
    from router_replay.engines.vllm.versions import installed_version, numbers_of

    if numbers_of(installed_version()) < MODULAR_ON_CPUS:
        command = [*command, "--worker-extension-cls=tests.engines.vllm.cpu_capture.Capture"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shape = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items() if value is not True]
    process = subprocess.Popen(
        [*command, *shape, "--enforce-eager", "--host=127.0.0.1", f"--port={port}"],
        env=variables,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Server(process, f"http://127.0.0.1:{port}", log)


# -- engines ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def vllm_engine(servers: Servers, checkpoints: Checkpoints) -> Iterator[Engine]:
    """In process, on checkpoint A. It depends on `servers` so that these start meanwhile."""
    from router_replay.engines.vllm.inprocess import VllmEngine
    from router_replay.engines.vllm.versions import installed_version, numbers_of

    if numbers_of(installed_version()) < MODULAR_ON_CPUS:
        pytest.skip(f"the CPU kernel of vLLM {installed_version()} chooses the experts itself, so none can be forced")
    with environment(**ENVIRONMENT):
        engine = VllmEngine(checkpoints.a, **SHAPE)
    with engine:
        yield engine


@pytest.fixture(scope="session")
def vllm_fresh_b(servers: Servers) -> Completion:
    """What an engine that was started on checkpoint B says: the reference for a swap to B."""
    from router_replay.engines.vllm.http import VllmHttpEngine

    with servers.ours.wait(lambda: VllmHttpEngine(servers.ours.url, api_key=KEY)) as engine:
        return one(engine, Request(prompt(), GREEDY))


@pytest.fixture(scope="session")
def vllm_http_engine(servers: Servers, vllm_fresh_b: Completion, checkpoints: Checkpoints) -> Iterator[Engine]:
    """Over HTTP, taken from B to A as soon as the reference is known."""
    from router_replay.engines.vllm.http import VllmHttpEngine

    with servers.ours.wait(lambda: VllmHttpEngine(servers.ours.url, api_key=KEY)) as engine:
        engine.update_weights(checkpoints.a, 0)
        yield engine


@pytest.fixture(scope="session")
def embedded_engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    from router_replay.engines.embedded import EmbeddedEngine

    with EmbeddedEngine(checkpoints.a, max_length=SHAPE["max_model_len"]) as engine:
        yield engine


@pytest.fixture(scope="session")
def pool_engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    """Two embedded engines as one."""
    from router_replay.engines import EmbeddedEngine, EnginePool

    engines = {name: EmbeddedEngine(checkpoints.a, max_length=SHAPE["max_model_len"]) for name in ("one", "two")}
    with EnginePool(engines) as pool:
        yield pool


@pytest.fixture(scope="session")
def embedded_fresh_b(checkpoints: Checkpoints) -> Completion:
    from router_replay.engines.embedded import EmbeddedEngine

    with EmbeddedEngine(checkpoints.b, max_length=SHAPE["max_model_len"]) as engine:
        return one(engine, Request(prompt(), GREEDY))


@pytest.fixture
def fresh_b(request: pytest.FixtureRequest, engine: Engine) -> Completion:
    """The reference for a swap to B is an engine of the same kind: two kinds do not round alike."""
    kind = "embedded" if type(engine).__name__ in ("EmbeddedEngine", "EnginePool") else "vllm"
    return request.getfixturevalue(f"{kind}_fresh_b")


@pytest.fixture(params=["embedded", "pool", "vllm", "vllm_http"])
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Engine]:
    """Every engine, running on A as version 0; whatever a test leaves behind is cleared."""
    engine: Engine = request.getfixturevalue(f"{request.param}_engine")
    yield engine
    engine.abort()
    engine.resume()
    if engine.version != 0:
        engine.update_weights(checkpoints.a, 0)


# -- the trainer --------------------------------------------------------------------------------------


class Trainer:
    """The transformers models of the checkpoints, replaying an engine's rows."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[object, object]] = {}

    def logprobs(
        self,
        checkpoint: str,
        prompt_ids: Sequence[int],
        completion: Completion,
        routes: Routes | None = None,
        temperature: float = 1.0,
    ) -> np.ndarray:
        """The trainer's log-prob of each token of the completion, with the rows of the whole sequence replayed."""
        import torch
        from transformers import AutoModelForCausalLM

        from router_replay import RouterReplay, Sample, logprobs, pack

        if checkpoint not in self._models:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
            self._models[checkpoint] = model, RouterReplay(model)
        model, replayer = self._models[checkpoint]
        tokens = np.concatenate([np.asarray(prompt_ids, np.int64), completion.token_ids])
        rows = completion.routes if routes is None else routes
        rows = Routes.concat([rows, Routes.missing(1, rows.spec)])  # the last token has none, and needs none
        mask = np.arange(len(tokens)) >= len(prompt_ids)
        batch = pack([Sample(tokens, np.zeros(len(tokens), np.float32), mask, rows)], len(tokens))
        with torch.no_grad(), replayer.replay(batch):
            return logprobs(model, batch, temperature=temperature)[: len(tokens) - 1].numpy()[len(prompt_ids) - 1 :]

    def gap(self, checkpoint: str, prompt_ids: Sequence[int], completion: Completion, routes: Routes) -> np.ndarray:
        return np.abs(self.logprobs(checkpoint, prompt_ids, completion, routes) - completion.logprobs)


@pytest.fixture(scope="session")
def trainer() -> Trainer:
    return Trainer()
