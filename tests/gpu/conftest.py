"""What the tests on a GPU share: a random model in bfloat16, one vLLM engine, and the trainer's side of both.

    make test-gpu                                  with the packages of this repository's environment
    python3 -m pytest tests/gpu                    with your own, from a source checkout with PYTHONPATH=src
    python3 -m pytest tests/gpu --device cpu       the same tests on the CPU, to try them out

They are not part of `make test`. The engine starts once, which takes one to three minutes on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from router_replay import RouterReplay, Routes, Sample, logprobs, pack
from router_replay.batch import Batch
from router_replay.engines import Completion, Request, Sampling
from router_replay.engines.environment import environment
from router_replay.measure import logprob_gap
from router_replay.rl.engine_start import CPU_ENVIRONMENT, QUIET

VOCABULARY = 512
SAMPLING = Sampling(max_tokens=24, ignore_eos=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="where the tests of tests/gpu run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA GPU on this machine"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


def make_model(seed: int, device: str) -> Any:
    """A Qwen3-MoE of 8 layers, 4 of 32 experts, in bfloat16. Larger weights than usual make its choices differ."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=8, num_experts=32,
        num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, norm_topk_prob=True,
        max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).to(device, torch.bfloat16).eval()


@dataclasses.dataclass
class Trainer:
    """A model with its replayer, and the gap of its log-probs to those of an engine."""

    model: Any
    replayer: RouterReplay

    def gap(self, requests: Sequence[Request], done: Sequence[Completion], rows_of: Sequence[Completion] = ()) -> float:
        """The k3 KL of the engine's tokens, with the rows of these completions replayed, or with those of others."""
        batch = packed(requests, done, rows_of or done)
        with torch.no_grad(), self.replayer.replay(batch):
            found = logprobs(self.model, batch)
        return logprob_gap(found, batch.label_logprobs, batch.label_mask).k3

    def agreement(self, requests: Sequence[Request], done: Sequence[Completion]) -> list[float]:
        """For each completion, the share of its experts that the model would choose itself, over all rows."""
        batch = packed(requests, done, done)
        with torch.no_grad(), self.replayer.record() as recording:
            logprobs(self.model, batch)
        own, engine = recording.routes.ids, batch.routes.ids
        shared_T = (own[..., :, None] == engine[..., None, :]).any(-1).mean(axis=(1, 2))
        return [float(shares[:-1].mean()) for shares in batch.per_sample(shared_T)]  # the last token has no row


def packed(requests: Sequence[Request], done: Sequence[Completion], rows_of: Sequence[Completion]) -> Batch:
    """Pack the sequences of these completions with the rows of the completions in `rows_of`."""
    samples = [sample_of(*one) for one in zip(requests, done, rows_of, strict=True)]
    return pack(samples, sum(len(sample.token_ids) for sample in samples))


def sample_of(request: Request, completion: Completion, rows_of: Completion) -> Sample:
    """The sequence of a completion, with loss on the sampled tokens. The last token has no row and needs none."""
    prompt = len(request.token_ids)
    tokens = np.concatenate([np.asarray(request.token_ids, np.int64), completion.token_ids])
    known = np.concatenate([np.zeros(prompt, np.float32), completion.logprobs])
    rows = Routes.concat([rows_of.routes, Routes.missing(1, rows_of.routes.spec)])
    return Sample(tokens, known, np.arange(len(tokens)) >= prompt, rows)


@pytest.fixture(scope="session")
def trainer(device: str) -> Trainer:
    """The model that the engine starts with."""
    model = make_model(0, device)
    return Trainer(model, RouterReplay(model))


@pytest.fixture(scope="session")
def new_trainer(device: str) -> Trainer:
    """A model of the same shape with other weights."""
    model = make_model(1, device)
    return Trainer(model, RouterReplay(model))


@pytest.fixture(scope="session")
def folders(trainer: Trainer, new_trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """The checkpoints of both."""
    folder = tmp_path_factory.mktemp("models")
    for name, one in (("first", trainer), ("second", new_trainer)):
        one.model.save_pretrained(folder / name)
    return [folder / "first", folder / "second"]


@pytest.fixture(scope="session")
def engine(device: str, folders: list[pathlib.Path]) -> Iterator[Any]:
    """vLLM with CUDA graphs (on a GPU) for every batch size that the tests use."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from router_replay.engines.vllm.inprocess import VllmEngine

    shape: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "use_tqdm_on_load": False}
    if device == "cuda":
        sizes = [1, 2, 4, 8, 16, 64, 128, 256]
        shape |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30, "cudagraph_capture_sizes": sizes}
    else:
        shape |= {"enforce_eager": True, "block_size": 32}
    with environment({**(CPU_ENVIRONMENT if device == "cpu" else {}), **QUIET}, keep_existing=True):
        engine = VllmEngine(str(folders[0]), **shape)
    with engine:
        yield engine


def prompts(count: int, tokens: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts."""
    return [tuple(row) for row in np.random.default_rng(seed).integers(3, VOCABULARY, (count, tokens)).tolist()]
