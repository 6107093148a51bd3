"""A tiny random model of every MoE family of transformers, for tests.

    tiny = make("deepseek_v3")
    tiny.model(**tiny.inputs)      # 2 sequences of 6 tokens, fp32, eager attention, a few layers

Every family gets the same small numbers where its config has such a field; `FAMILIES` holds the class
and what a family needs besides. Biases that take part in the choice of experts are made random, since
zero biases would hide a replay that mixes up the biased and the unbiased scores.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from router_replay.families import measured
from router_replay.families.versions import is_older

BATCH, LENGTH = 2, 6
VOCAB = 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "num_experts_per_token": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "top_k_experts": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "sliding_window": 4,
    "shared_expert_intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}

MLA: dict[str, Any] = {"num_key_value_heads": 4}  # latent attention has as many key heads as query heads
KDA: dict[str, Any] = {"linear_head_dim": 8, "linear_num_heads": 4}
SPARSE = ["dense", "sparse", "sparse"]
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "top_k_experts": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def mrope(section: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}


# Buffers and parameters that are added to the scores before the choice. Zero at initialisation.
CHOICE_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The class of a family's decoder, and the config fields that the common ones do not give."""

    model: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    seq2seq: bool = False


def _recipe(model: str, seq2seq: bool = False, **fields: Any) -> Recipe:
    return Recipe(model, fields, seq2seq)


FAMILIES: dict[str, Recipe] = {
    "afmoe": _recipe("AfmoeForCausalLM"),
    "aria": _recipe("AriaTextForCausalLM"),
    "axk1": _recipe("AXK1ForCausalLM", **MLA),
    "axk2": _recipe("AXK2ForCausalLM", **MLA),
    "bailing_hybrid": _recipe(
        "BailingHybridForCausalLM",
        **MLA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=SPARSE,
    ),
    "beam": _recipe("BeamForCausalLM", mlp_layer_types=SPARSE),
    "cohere2_moe": _recipe("Cohere2MoeForCausalLM"),
    "dbrx": _recipe(
        "DbrxForCausalLM",
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"moe_num_experts": 8, "moe_top_k": 3, "ffn_hidden_size": 24},
    ),
    "deepseek_ocr2": _recipe("DeepseekOcr2TextModel", mlp_layer_types=SPARSE, topk_method="group_limited_greedy"),
    "deepseek_v2": _recipe("DeepseekV2ForCausalLM", **MLA, topk_method="group_limited_greedy"),
    "deepseek_v3": _recipe("DeepseekV3ForCausalLM", **MLA),
    "deepseek_v32": _recipe("DeepseekV32ForCausalLM", **MLA),
    "deepseek_v4": _recipe(
        "DeepseekV4ForCausalLM",
        num_key_value_heads=1,
        o_groups=2,
        o_lora_rank=8,
        hc_mult=2,
        n_shared_experts=1,
        mlp_layer_types=["hash_moe", "moe", "moe"],
    ),
    "diffusion_gemma": _recipe(
        "DiffusionGemmaForBlockDiffusion",
        seq2seq=True,
        vision_config={
            "model_type": "gemma4_vision",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 16,
        },
        text_config={**TEXT, "num_global_key_value_heads": 2, "global_head_dim": 8, "sliding_window": 4},
    ),
    "doge": _recipe("DogeForCausalLM", is_moe=True, num_experts=16),
    "dots1": _recipe("Dots1ForCausalLM", n_shared_experts=1),
    "ernie4_5_moe": _recipe("Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": _recipe(
        "Ernie4_5_VLMoeTextModel", moe_intermediate_size=[24, 16], rope_parameters=mrope([1, 1, 2])
    ),
    "exaone_moe": _recipe("ExaoneMoeForCausalLM"),
    "flex_olmo": _recipe("FlexOlmoForCausalLM"),
    "flint": _recipe("FlintForCausalLM"),
    "gemma4": _recipe(
        "Gemma4ForCausalLM", enable_moe_block=True, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8
    ),
    "glm4_moe": _recipe("Glm4MoeForCausalLM"),
    "glm4_moe_lite": _recipe("Glm4MoeLiteForCausalLM", **MLA),
    "glm4v_moe": _recipe("Glm4vMoeTextModel", head_dim=16, rope_parameters=mrope([2, 1, 1])),
    "glm5_next": _recipe(
        "Glm5NextTextModel", qk_rope_head_dim=0, **MLA, **KDA, mlp_layer_types=SPARSE, hc_mult=2, index_kpool=2
    ),
    "glm_moe_dsa": _recipe("GlmMoeDsaForCausalLM", **MLA),
    "gpt_oss": _recipe("GptOssForCausalLM"),
    "granitemoe": _recipe("GraniteMoeForCausalLM"),
    "granitemoe_swa": _recipe("GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": _recipe(
        "GraniteMoeHybridForCausalLM",
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_chunk_size=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "granitemoeshared": _recipe("GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": _recipe("HunYuanMoEV1ForCausalLM"),
    "hy_v3": _recipe("HYV3ForCausalLM"),
    "hy_v4": _recipe("HYV4ForCausalLM", **MLA),
    "inkling": _recipe(
        "InklingForCausalLM",
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        rel_extent=16,
        d_rel=4,
        mlp_layer_types=SPARSE,
    ),
    "jamba": _recipe(
        "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, num_hidden_layers=4
    ),
    "jetmoe": _recipe("JetMoeForCausalLM"),
    "kimi_linear": _recipe("KimiLinearForCausalLM", **MLA, linear_head_dim=8, linear_num_heads=4),
    "kolibri1": _recipe("Kolibri1ForCausalLM"),
    "laguna": _recipe("LagunaForCausalLM"),
    "lfm2_moe": _recipe("Lfm2MoeForCausalLM", layer_types=["conv", "full_attention", "conv"]),
    "llama4": _recipe("Llama4ForCausalLM"),
    "longcat_flash": _recipe(
        "LongcatFlashForCausalLM", **MLA, num_layers=2, expert_ffn_hidden_size=24, zero_expert_num=4
    ),
    "mellum": _recipe("MellumForCausalLM"),
    "mimo_v2_flash": _recipe("MiMoV2FlashForCausalLM"),
    "minimax": _recipe("MiniMaxForCausalLM"),
    "minimax_m2": _recipe("MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": _recipe(
        "MiniMaxM3VLForCausalLM", mlp_layer_types=SPARSE, dense_intermediate_size=48, shared_intermediate_size=24
    ),
    "mistral4": _recipe("Mistral4ForCausalLM", **MLA),
    "mistral_large4": _recipe(
        "MistralLarge4ForConditionalGeneration",
        image_token_index=63,
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        text_config={
            **TEXT,
            **MLA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "index_topk": 4,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "mlp_layer_types": SPARSE,
        },
    ),
    "mixtral": _recipe("MixtralForCausalLM"),
    "muse_spark": _recipe("MuseSparkTextModel", moe_hidden_size=16, mlp_layer_types=SPARSE),
    "nemotron_h": _recipe(
        "NemotronHForCausalLM",
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=24,
    ),
    "nllb_moe": _recipe(
        "NllbMoeForConditionalGeneration",
        seq2seq=True,
        d_model=32,
        encoder_layers=2,
        decoder_layers=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        decoder_sparse_step=2,
        init_std=0.2,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        dropout=0.0,
        attention_dropout=0.0,
        moe_token_dropout=0.0,
        encoder_sparse_step=2,
        pad_token_id=1,
        bos_token_id=0,
    ),
    "olmoe": _recipe("OlmoeForCausalLM"),
    "openai_privacy_filter": _recipe("OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": _recipe("PhimoeForCausalLM", num_experts_per_tok=2),
    "qwen2_moe": _recipe("Qwen2MoeForCausalLM"),
    "qwen3_5_moe": _recipe("Qwen3_5MoeForCausalLM"),
    "qwen3_moe": _recipe("Qwen3MoeForCausalLM"),
    "qwen3_next": _recipe("Qwen3NextForCausalLM"),
    "qwen3_omni_moe": _recipe("Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": _recipe("Qwen3VLMoeTextModel"),
    "qwen4_exp": _recipe(
        "Qwen4ExpForCausalLM",
        hc_count=2,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "solar_open": _recipe("SolarOpenForCausalLM"),
    "step3p7": _recipe("Step3p7TextModel", mlp_layer_types=SPARSE),
    "switch_transformers": _recipe(
        "SwitchTransformersForConditionalGeneration",
        seq2seq=True,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=4,
        num_heads=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=2,
        dropout_rate=0.0,
    ),
    "unlimited_ocr": _recipe(
        "UnlimitedOcrTextModel", **MLA, mlp_layer_types=SPARSE, topk_method="group_limited_greedy"
    ),
    "zaya": _recipe("ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=16),
}


@dataclasses.dataclass
class Tiny:
    """A model, the keyword arguments of one forward pass, and how many decoder tokens that pass has."""

    family: str
    model: nn.Module
    inputs: dict[str, Any]
    tokens: int

    def forward(self) -> Tensor:
        """The logits (or hidden states) of the pass. Seeded: phimoe and jitter draw numbers in training."""
        torch.manual_seed(7)
        out = self.model(**self.inputs)
        return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> Tiny:
    """The tiny model; skips the test where the installed transformers is too old for the family."""
    known = measured.FAMILIES.get(family)
    if known is not None and is_older(known.since):
        pytest.skip(f"{family} needs transformers >= {known.since}")
    return build(family, seed, dtype, **fields)


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> Tiny:
    recipe = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class = getattr(module, recipe.model)
    config = _config(model_class.config_class, {**recipe.fields, **fields})
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation="eager", dtype=dtype)
    if dtype is torch.float64:  # grouped matrix products know no double
        model.set_experts_implementation("eager")
    _shake(model)
    model.train()
    return Tiny(family, model, _inputs(recipe, seed), BATCH * LENGTH)


def _config(config_class: type, fields: dict[str, Any]) -> Any:
    known = set(_fields(config_class))
    known |= set(getattr(config_class, "attribute_map", {}))
    common = {name: value for name, value in COMMON.items() if name in known and name not in fields}
    aliases = getattr(config_class, "attribute_map", {})
    common = {name: value for name, value in common.items() if aliases.get(name, name) not in fields}
    return config_class(**common, **fields)


def _fields(config_class: type) -> Iterable[str]:
    """The fields of a config: a dataclass, or in older transformers a class with an __init__ of its own."""
    if dataclasses.is_dataclass(config_class):
        return [field.name for field in dataclasses.fields(config_class)]
    return inspect.signature(config_class.__init__).parameters


def _shake(model: nn.Module) -> None:
    """Random choice biases, and no matrix that is all zero."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.rsplit(".", 1)[-1] in CHOICE_BIASES:
                tensor.add_(torch.randn_like(tensor) * 0.05)
            elif isinstance(tensor, nn.Parameter) and tensor.ndim > 1 and not tensor.any():
                tensor.normal_(std=0.2)  # afmoe and ernie start with routers that score every expert alike


def _inputs(recipe: Recipe, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed + 1)

    def tokens() -> Tensor:
        return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)

    if recipe.seq2seq:
        return {"input_ids": tokens(), "decoder_input_ids": tokens(), "use_cache": False}
    return {"input_ids": tokens(), "use_cache": False}
