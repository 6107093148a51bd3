"""Routers in float32 inside a bfloat16 engine: neither loading, nor a weight update, nor a pass rounds their logits.

The rows of each router are one vector times 1, 1 + s, 1 + 2s ..., with s below the precision of bfloat16: in float32
the logits are in the order of the experts, and in bfloat16 they are all equal.
"""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from router_replay.engines import EmbeddedEngine, Engine, Request, Sampling, VllmEngine
from router_replay.errors import EngineError
from router_replay.routes import Routes
from tests.engines.conftest import ENVIRONMENT, environment

EXPERTS, TOP_K = 16, 4
STEP = 2.0**-13
FIRST, LAST = np.arange(TOP_K), np.arange(EXPERTS - TOP_K, EXPERTS)
KINDS = ["embedded", "vllm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """A model whose logits rise with the expert's id, and the same one where they fall."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    made = {}
    for name, sign in (("rising", 1), ("falling", -1)):
        generator = torch.Generator().manual_seed(1)
        for layer in model.model.layers:
            base_H = torch.randn(config.hidden_size, generator=generator).bfloat16().float()
            with torch.no_grad():
                layer.mlp.gate.weight.copy_(base_H * (1 + sign * STEP * torch.arange(EXPERTS))[:, None])
        made[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(made[name])
    return made


@pytest.fixture
def start(folders: dict[str, pathlib.Path]) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def start(kind: str, **arguments: Any) -> Engine:
        folder = str(folders["rising"])
        if kind == "embedded":
            opened.append(EmbeddedEngine(folder, dtype=torch.bfloat16, **arguments))
        elif importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        else:
            shape = {"dtype": "bfloat16", "max_model_len": 128, "block_size": 32, "enforce_eager": True}
            with environment(**ENVIRONMENT):
                opened.append(VllmEngine(folder, **shape, **arguments))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()


def routes_of(engine: Engine) -> Routes:
    tokens = tuple(np.random.default_rng(0).integers(3, 64, 90).tolist())
    [completion] = engine.generate([Request(tokens, Sampling(max_tokens=2, temperature=0.0, ignore_eos=True))])
    return completion.routes


def share_of(routes: Routes, experts: np.ndarray) -> float:
    return float((np.sort(routes.ids[:, 0], axis=-1) == experts).all(-1).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_float32_logits_decides(
    kind: str, start: Callable[..., Engine], folders: dict[str, pathlib.Path]
) -> None:
    engine = start(kind, router_dtype="float32")
    rising = routes_of(engine)
    assert share_of(rising, FIRST) > 0.2  # where the logits are negative
    assert share_of(rising, LAST) > 0.2
    assert share_of(rising, FIRST) + share_of(rising, LAST) > 0.9  # the others are too near to zero
    engine.update_weights(str(folders["falling"]), 1)
    falling = routes_of(engine)
    assert share_of(falling, FIRST) == pytest.approx(share_of(rising, LAST), abs=0.1)
    assert share_of(falling, LAST) == pytest.approx(share_of(rising, FIRST), abs=0.1)


def test_the_model_s_own_dtype_cannot_tell_them_apart(start: Callable[..., Engine]) -> None:
    routes = routes_of(start("embedded"))
    assert share_of(routes, FIRST) + share_of(routes, LAST) in (0.0, 1.0)  # one choice, whatever it is, for all tokens


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype_is_refused(kind: str, start: Callable[..., Engine]) -> None:
    with pytest.raises(EngineError, match=r"router_dtype must be .*, got 'bfloat16'"):
        start(kind, router_dtype="bfloat16")
