"""RouterSpec.from_config on plain dicts, each with its layers written out by hand.

tests/replay/test_families.py holds the same function against the real modules of every family.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from router_replay.errors import SpecError
from router_replay.spec import RouterSpec

# model_type, the fields its config.json has, (experts, top-k, routed layers)
CASES: list[tuple[str, dict[str, Any], tuple[int, int, tuple[int, ...]]]] = [
    ("qwen2_moe", {"num_hidden_layers": 3, "num_experts": 60, "num_experts_per_tok": 4}, (60, 4, (0, 1, 2))),
    (
        "qwen3_moe",
        {
            "num_hidden_layers": 6,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        (128, 8, (1, 5)),
    ),
    (
        "deepseek_v2",
        {"num_hidden_layers": 4, "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
        (64, 6, (1, 2, 3)),
    ),
    (
        "deepseek_v3",
        {
            "num_hidden_layers": 5,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
        (256, 8, (3, 4)),
    ),
    ("deepseek_v3", {"num_hidden_layers": 5, "n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8, (3, 4))),
    (
        "kimi_k2",  # not a model type of transformers: the fields alone say it
        {"num_hidden_layers": 3, "n_routed_experts": 384, "num_experts_per_tok": 8, "first_k_dense_replace": 1},
        (384, 8, (1, 2)),
    ),
    (
        "glm4_moe",
        {"num_hidden_layers": 4, "n_routed_experts": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 2},
        (128, 8, (2, 3)),
    ),
    (
        "glm4_moe_lite",
        {
            "num_hidden_layers": 4,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
        (64, 4, (1, 3)),
    ),
    ("mixtral", {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2, (0, 1))),
    ("olmoe", {"num_hidden_layers": 2, "num_experts": 64, "num_experts_per_tok": 8}, (64, 8, (0, 1))),
    ("gpt_oss", {"num_hidden_layers": 2, "num_local_experts": 32, "num_experts_per_tok": 4}, (32, 4, (0, 1))),
    (
        "llama4_text",
        {
            "num_hidden_layers": 6,
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        (128, 1, (1, 3, 5)),
    ),
    (
        "llama4_text",
        {
            "num_hidden_layers": 6,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "moe_layers": [0, 4],
        },
        (16, 1, (0, 4)),
    ),
    (
        "jamba",
        {
            "num_hidden_layers": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 3,
            "expert_layer_offset": 1,
        },
        (16, 2, (1, 4, 7)),
    ),
    (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 8,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 6,
            "moe_layer_interval": 2,
        },
        (64, 6, (3, 5)),
    ),
    (
        "ernie4_5_moe_vl",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": [64, 64],
            "moe_k": 6,
            "moe_layer_start_index": [1, 1],
            "moe_layer_end_index": [3, 2],
            "moe_layer_interval": 1,
        },
        (64, 6, (1, 2, 3)),
    ),
    (
        "afmoe",
        {"num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 6, "num_dense_layers": 2},
        (64, 6, (2, 3)),
    ),
    (
        "nemotron_h",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
        (8, 2, (1, 3)),
    ),
    (
        "nemotron_h",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 5, "hybrid_override_pattern": "MEM*E"},
        (8, 2, (1, 4)),
    ),
    (
        "granitemoehybrid",
        {
            "num_hidden_layers": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention"],
        },
        (8, 2, (0, 1)),
    ),
    (
        "minimax_m3_vl_text",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "moe_layer_freq": [0, 0, 1, 1],
        },
        (128, 4, (2, 3)),
    ),
    (
        "step3p5",
        {
            "num_hidden_layers": 6,
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "moe_layers_enum": "3,4,5,6,7,8",  # 6 to 8 are MTP layers
        },
        (288, 8, (3, 4, 5)),
    ),
    (
        "deepseek_v4",
        {
            "num_hidden_layers": 4,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        },
        (256, 6, (2, 3)),
    ),
    (
        "longcat_flash",
        {"num_layers": 2, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12},
        (768, 12, (0, 1)),
    ),
    ("dbrx", {"n_layers": 2, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}, (16, 4, (0, 1))),
    ("jetmoe", {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2, (0, 0, 1, 1))),
    ("zaya", {"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 1}, (17, 1, (0, 1))),
    ("hunyuan_v1_moe", {"num_hidden_layers": 2, "num_experts": 64, "moe_topk": [8, 8]}, (64, 8, (0, 1))),
    (
        "switch_transformers",
        {
            "num_layers": 12,
            "num_decoder_layers": 8,
            "num_experts": 8,
            "decoder_sparse_step": 4,
            "encoder_sparse_step": 2,
        },
        (8, 1, (1, 5)),
    ),
]


@pytest.mark.parametrize(("model_type", "fields", "expected"), CASES)
def test_layers_written_by_hand(
    model_type: str, fields: dict[str, Any], expected: tuple[int, int, tuple[int, ...]]
) -> None:
    spec = RouterSpec.from_config({"model_type": model_type, **fields})
    assert (spec.num_experts, spec.top_k, spec.layers) == expected
    assert spec.num_layers is not None
    assert spec.num_layers > spec.layers[-1]
    assert not spec.ordered


def test_slot_order_has_a_meaning_in_two_families() -> None:
    phimoe = {"model_type": "phimoe", "num_hidden_layers": 2, "num_local_experts": 16, "num_experts_per_tok": 2}
    assert RouterSpec.from_config(phimoe) == RouterSpec(16, 2, (0, 1), ordered=True)
    nllb = {
        "model_type": "nllb-moe",
        "decoder_layers": 8,
        "encoder_layers": 24,
        "num_experts": 128,
        "decoder_sparse_step": 4,
    }
    spec = RouterSpec.from_config(nllb)
    assert spec == RouterSpec(128, 2, (3, 7), ordered=True)
    assert spec.num_layers == 8


def test_nested_configs_and_objects() -> None:
    text = {"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    expected = RouterSpec(8, 2, (0, 1))
    assert RouterSpec.from_config({"model_type": "qwen3_vl_moe", "text_config": text}) == expected
    assert RouterSpec.from_config({"thinker_config": {"text_config": text}, "talker_config": {}}) == expected
    assert RouterSpec.from_config(SimpleNamespace(**text)) == expected
    assert RouterSpec.from_config(SimpleNamespace(text_config=SimpleNamespace(to_dict=lambda: text))) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, ["num_experts", "n_routed_experts", "'llama'", "none"]),
        (
            {"model_type": "x", "num_hidden_layers": 2, "num_experts": 8, "moe_pick": 2},
            ["num_experts_per_tok", "moe_pick"],
        ),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, ["num_hidden_layers"]),
        (
            {"model_type": "x", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
            ["'x'", "first_k_dense_replace", "mlp_layer_types"],
        ),
        (
            {"model_type": "gemma4_text", "num_hidden_layers": 2, "enable_moe_block": False},
            ["enable_moe_block", "dense"],
        ),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 0, "num_experts_per_tok": 2},
            ["num_experts is 0"],
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_hidden_layers": 2, "num_experts": 8, "moe_topk": [1, 2]},
            ["must be the same in all layers"],
        ),
        (
            {
                "model_type": "afmoe",
                "num_hidden_layers": 2,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "num_dense_layers": 2,
            },
            ["none of the 2 decoder layers"],
        ),
    ],
)
def test_an_unknown_config_says_what_was_looked_for(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        RouterSpec.from_config(fields)
    for word in words:
        assert word in str(caught.value)


def test_not_a_config() -> None:
    with pytest.raises(SpecError, match="expected a transformers config"):
        RouterSpec.from_config(3)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from router_replay.spec import RouterSpec;"
        "RouterSpec.from_config(dict(model_type='mixtral', num_layers=2, num_experts=8, moe_topk=2));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
