"""A real SGLang server on the CPU for `make test-sglang`, and a list of what was verified on it.

The server has a virtual environment of its own (environment.py makes it); these tests only talk to it.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from router_replay.engines.sglang import SglangEngine
from tests.sglang_real import environment

VOCABULARY = 128
FLAGS = [
    "--host",
    "127.0.0.1",
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--dtype",
    "float32",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--enable-return-routed-experts",
    "--max-total-tokens",
    "4096",
    "--max-running-requests",
    "8",
    "--context-length",
    "512",
]
_verified: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _verified:  # plain `make test` loads this file too
        return
    terminalreporter.section("verified on the real SGLang server")
    for line in _verified:
        terminalreporter.write_line(f"  {line}")


@pytest.fixture
def verified() -> Callable[[str], None]:
    return _verified.append


def prompt(seed: int = 0, tokens: int = 20) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCABULARY, tokens).tolist())


class Server:
    """The process, its URL, and calls past our engine: what another client of the server might do."""

    def __init__(self, model: pathlib.Path, log: pathlib.Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        launcher = pathlib.Path(__file__).with_name("launch.py")
        command = [environment.python(), str(launcher), "--model-path", str(model), "--port", str(port), *FLAGS]
        variables = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables.pop("PYTHONPATH", None)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        deadline = time.monotonic() + 600
        while b"fired up" not in log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                pytest.fail(f"the SGLang server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def running(self) -> int:
        """How many requests have had their first token, and not their last."""
        with urllib.request.urlopen(f"{self.url}/v1/loads", timeout=120) as answer:
            return sum(int(load["num_running_reqs"]) for load in json.load(answer)["loads"])

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the group that start_new_session made
            self.process.wait(30)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """Two random checkpoints of one tiny Qwen3-MoE, each with a word-per-token tokenizer."""
    code = """
import sys, tokenizers, torch, transformers
config = transformers.Qwen3MoeConfig(
    vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4,
    max_position_embeddings=512, norm_topk_prob=True, initializer_range=0.2, eos_token_id=1, bos_token_id=2,
    pad_token_id=0, tie_word_embeddings=False)
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
for seed, folder in enumerate(sys.argv[1:]):
    torch.manual_seed(seed)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
"""
    folders = [tmp_path_factory.mktemp(name) for name in ("a", "b")]
    subprocess.run([sys.executable, "-c", code, *map(str, folders)], check=True, capture_output=True)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def server(models: tuple[pathlib.Path, pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(models[0], tmp_path_factory.mktemp("sglang") / "server.log")
    yield server
    server.stop()


@pytest.fixture
def engine(server: Server, models: tuple[pathlib.Path, pathlib.Path]) -> Iterator[SglangEngine]:
    """An engine on checkpoint A, whatever the test before has loaded."""
    server.post("/continue_generation", {})
    with SglangEngine(server.url, timeout=120) as engine:
        engine.update_weights(str(models[0]), version=0)
        yield engine
