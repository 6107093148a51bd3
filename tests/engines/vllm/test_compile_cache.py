"""vLLM's key of compiled code is the same for the same model in another folder."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from router_replay.engines.vllm.plugin.repairs.compile_cache import without_folder

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make setup)", allow_module_level=True)

from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs

ORIGINAL = getattr(ModelConfig.compute_hash, "__wrapped__", ModelConfig.compute_hash)
key_of = without_folder(ORIGINAL)


def config_in(folder: pathlib.Path, layers: int = 2, **more: Any) -> Any:
    """vLLM's config of a tiny model in this folder."""
    made = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=16, num_experts_per_tok=4, vocab_size=128,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    made.save_pretrained(folder)
    arguments = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **more)
    return arguments.create_model_config()


def test_the_key_does_not_depend_on_the_folder(tmp_path: pathlib.Path) -> None:
    one, other = config_in(tmp_path / "one"), config_in(tmp_path / "other")
    assert ORIGINAL(one) != ORIGINAL(other)  # the reason for the repair
    assert key_of(one) == key_of(other)
    assert one.model == str(tmp_path / "one")  # restored


def test_the_key_depends_on_the_model(tmp_path: pathlib.Path) -> None:
    assert key_of(config_in(tmp_path / "one")) != key_of(config_in(tmp_path / "other", layers=3))


def test_a_folder_with_code_of_its_own_keeps_its_key(tmp_path: pathlib.Path) -> None:
    config = config_in(tmp_path / "one", trust_remote_code=True)
    assert key_of(config) == ORIGINAL(config)
