"""New weights of a model whose output head is its embedding: both are the new ones, also where vLLM packs the head."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from router_replay.engines import Request, VllmEngine
from router_replay.engines.vllm.weights import share
from tests.engines.conftest import ENVIRONMENT, GREEDY, SHAPE, VOCABULARY, environment, one, prompt, same

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def save_tied(folder: pathlib.Path, seed: int) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, eos_token_id=1, bos_token_id=0, pad_token_id=2,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    state = Qwen3MoeForCausalLM(config).state_dict()
    del state["lm_head.weight"]  # as in the checkpoints of tied models
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_the_head_of_a_tied_model_is_that_of_a_fresh_engine(tmp_path: pathlib.Path) -> None:
    shape = {**SHAPE, "dtype": "bfloat16", "skip_tokenizer_init": True}
    for seed, name in enumerate("ab"):
        save_tied(tmp_path / name, seed)
    states = {name: load_file(tmp_path / name / "model.safetensors") for name in "ab"}
    with environment(**ENVIRONMENT), VllmEngine(str(tmp_path / "b"), **shape) as engine:
        on_b = one(engine, Request(prompt(), GREEDY))
    with environment(**ENVIRONMENT), VllmEngine(str(tmp_path / "a"), **shape) as engine:
        on_a = one(engine, Request(prompt(), GREEDY))
        assert not same(on_a, on_b)
        for version, name, expected in ((1, "b", on_b), (2, "a", on_a), (3, "b", on_b)):
            engine.update_weights(str(tmp_path / name), version)
            assert same(one(engine, Request(prompt(), GREEDY)), expected), version
        with share(states["a"]) as shared:
            engine.update_weights(shared, 4)
        assert same(one(engine, Request(prompt(), GREEDY)), on_a)
