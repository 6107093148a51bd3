"""Hold one record per MoE family of transformers, and the lookups. docs/adding_a_family.md says how to add one."""

from __future__ import annotations

from typing import Any

from router_replay.families.types import YES, Borders, Choice, ConfigRules, Family, Packing, Where

MIXES_TOKENS = "its router mixes the tokens of a batch"

_ONE_DENSE, _THREE_DENSE = ConfigRules(dense_first=1), ConfigRules(dense_first=3)
_MASKS, _FOUR_ROWS = Packing(Borders.MASKS), Packing(Borders.FOUR_ROWS)
_STATE = Packing(None, "carries state along the sequence by recurrence or convolution")
_INDEX = Packing(None, "its attention picks keys by an index over the whole row")
_ENCODER_DECODER = Packing(None, "an encoder-decoder")
# Reasons why `torch.compile(fullgraph=True)` fails even on the plain model, without replay (transformers 5.19, torch
# 2.13 on a CPU, experts_implementation="batched_mm"). In all other families the replayed model compiles, and new
# routes do not recompile it.
_LOOP = "no: the plain model loops over the experts that were hit"
_STRIDES = "no: the plain model's backward fails under aot_eager (a view in softplus_backward); its forward compiles"
_ONE_MODULE = "no: one module holds its router and its experts"
_MULTIPLIES = "no: the plain model multiplies what comes from its router with bfloat16 matrices"
_HOLDER = Where(parent=True, method="route_tokens_to_experts")
_DROPS = "tokens over an expert's capacity are dropped as in a live pass"


def _tried(name: str, **differs: Any) -> Family:
    """Return a family with a tiny model in tests/replay/tiny.py; the tests replay, pack, compile and checkpoint it."""
    usual: dict[str, Any] = {
        "config": ConfigRules(),
        "replay": YES,
        "packing": Packing(Borders.POSITIONS),
        "attention": YES,
        "compiles": YES,
        "checkpointing": YES,
        "float32_router": YES,
    }
    return Family(name, **{**usual, **differs})


FAMILIES: tuple[Family, ...] = (
    _tried("afmoe", config=_ONE_DENSE, packing=_MASKS),
    _tried("aria", model_types=("aria_text",)),
    _tried("axk1", config=_ONE_DENSE),
    _tried("axk2", config=_ONE_DENSE, packing=_INDEX),
    _tried("bailing_hybrid", config=ConfigRules(dense_first=2), packing=_STATE),
    _tried("beam", config=_THREE_DENSE),
    _tried("cohere2_moe"),
    _tried(
        "dbrx",
        config=ConfigRules(nested="ffn_config"),
        where={"DbrxRouter": _HOLDER},
        float32_router=_ONE_MODULE,
        compiles=_LOOP,
    ),
    _tried("deepseek_ocr2", model_types=("deepseek_ocr2_text",)),
    _tried("deepseek_v2"),
    _tried("deepseek_v3", config=_THREE_DENSE),
    _tried("deepseek_v32", config=_THREE_DENSE, packing=_INDEX),
    _tried(
        "deepseek_v4",
        config=_THREE_DENSE,  # its three leading layers hash the token id
        packing=Packing(None, "its attention compresses keys over blocks of the row"),
        note="its hash layers choose by token id and have no column",
    ),
    _tried(
        "diffusion_gemma",
        model_types=("diffusion_gemma_text",),
        packing=_ENCODER_DECODER,
        cache_of_the_encoder=True,
        note="decoder only: the encoder of the prompt stays live",
    ),
    _tried(
        "doge",
        classes=("DogeCDMoE",),
        config=ConfigRules(switch="is_moe"),
        choice=Choice.PRODUCT_KEYS,
        packing=Packing(None, MIXES_TOKENS),
        mixes_tokens=True,
        float32_router=_ONE_MODULE,
        compiles=_STRIDES,
        note=f"{MIXES_TOKENS}: routes hold for the same batch layout only",
    ),
    _tried("dots1"),
    _tried("ernie4_5_moe", config=_ONE_DENSE),
    _tried(
        "ernie4_5_vl_moe",
        model_types=("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl"),
        config=_ONE_DENSE,
        where={"Ernie4_5_VLMoeMoeBlock": Where(child="text_moe.gate")},  # its vision_moe routes images separately
        packing=_FOUR_ROWS,
        note="text experts; a pass with image tokens in it is refused",
    ),
    _tried("exaone_moe", config=_ONE_DENSE),
    _tried("flex_olmo"),
    _tried("flint"),
    _tried("gemma4", model_types=("gemma4_text",), config=ConfigRules(switch="enable_moe_block")),
    _tried("glm4_moe", config=_ONE_DENSE),
    _tried("glm4_moe_lite", config=_ONE_DENSE),
    _tried("glm4v_moe", model_types=("glm4v_moe", "glm4v_moe_text"), config=_ONE_DENSE, packing=_FOUR_ROWS),
    _tried("glm5_next", model_types=("glm5_next_text",), config=_THREE_DENSE, packing=_STATE),
    _tried("glm_moe_dsa", config=_THREE_DENSE, packing=_INDEX),
    _tried("gpt_oss", packing=_MASKS, sinks=True),
    _tried("granitemoe"),
    _tried("granitemoe_swa", sinks=True),
    _tried("granitemoehybrid", packing=_STATE),
    _tried("granitemoeshared"),
    _tried("hunyuan_v1_moe"),
    _tried("hy_v3", config=_ONE_DENSE),
    _tried("hy_v4", config=_ONE_DENSE, packing=_INDEX),
    _tried("inkling", model_types=("inkling_text",), packing=_STATE, float32_router=_MULTIPLIES),
    # Its router became a module of its own, JambaTopKRouter, after transformers 5.19.
    _tried("jamba", config=None, where={"Linear": _HOLDER}, packing=_STATE, float32_router=_ONE_MODULE),
    _tried(
        "jetmoe",
        classes=("JetMoeTopKGating",),
        config=ConfigRules(routers_per_layer=2),
        where={"JetMoeAttention": Where(skip=True)},  # its JetMoeTopKGating is also named
        checkpointing="not offered by transformers; replay works where a layer is checkpointed by hand",
        float32_router=_MULTIPLIES,
        note="two routers a layer: attention, then MLP",
    ),
    _tried("kimi_linear", config=_ONE_DENSE, packing=_STATE),
    _tried("kolibri1"),
    _tried("laguna", config=_ONE_DENSE),
    _tried("lfm2_moe", config=ConfigRules(dense_first=2), packing=_STATE),
    _tried(
        "llama4",
        model_types=("llama4_text",),
        attention="no: it attends within chunks of a sequence",
        float32_router=_MULTIPLIES,
    ),
    _tried(
        "longcat_flash",
        config=ConfigRules(extra_experts="zero_expert_num"),
        compiles=_LOOP,
        note="ids from n_routed_experts on are its zero experts",
    ),
    _tried("mellum"),
    _tried("mimo_v2_flash", config=_ONE_DENSE, sinks=True),
    _tried("minimax", packing=_STATE),
    _tried("minimax_m2"),
    _tried(
        "minimax_m3_vl",
        model_types=("minimax_m3_vl_text",),
        packing=Packing(Borders.POSITIONS, "only where no layer is minimax_m3_sparse"),
    ),
    _tried("mistral4"),
    _tried("mistral_large4", model_types=("mistral_large4_text",), config=_ONE_DENSE, packing=_INDEX),
    _tried("mixtral"),
    _tried("muse_spark", model_types=("muse_spark_text",)),
    _tried("nemotron_h", config=None, packing=_STATE),
    _tried(
        "nllb_moe",
        model_types=("nllb-moe",),
        classes=("NllbMoeTop2Router",),
        config=ConfigRules(depth="decoder_layers"),
        choice=Choice.ARGMAX,
        ordered=True,
        top_k=2,
        packing=_ENCODER_DECODER,
        compiles="no: the plain model branches on a tensor",
        note=f"decoder only; slot order is meaning; {_DROPS}",
    ),
    _tried("olmoe"),
    _tried("openai_privacy_filter", packing=Packing(None, "its attention looks ahead")),
    _tried(
        "phimoe",
        classes=("PhimoeTopKRouter",),
        choice=Choice.SPARSE_MIXER,
        ordered=True,
        attention="no: its layers do not tell their attention the sliding window",
        note="slot order is meaning; its gradient in training is an estimate by design",
    ),
    _tried("qwen2_moe"),
    _tried("qwen3_5_moe", model_types=("qwen3_5_moe_text",), packing=_STATE, compiles=_STRIDES),
    _tried("qwen3_moe"),
    _tried("qwen3_next", packing=_STATE, compiles=_STRIDES),
    _tried(
        "qwen3_omni_moe",
        model_types=("qwen3_omni_moe_text", "qwen3_omni_moe_talker_text"),
        note="the thinker; wrap model.talker itself to replay the talker",
    ),
    _tried("qwen3_vl_moe", model_types=("qwen3_vl_moe_text",)),
    _tried(
        "qwen4_exp",
        model_types=("qwen4_exp_text",),
        packing=_STATE,
        compiles="no: the plain model's attention indexer has a size that depends on data",
    ),
    _tried("solar_open"),
    _tried("step3p7", model_types=("step3p5",), config=_THREE_DENSE, compiles=_LOOP),
    _tried(
        "switch_transformers",
        classes=("SwitchTransformersTop1Router",),
        config=ConfigRules(depth="num_decoder_layers", sparse_offset=2),
        choice=Choice.ARGMAX,
        top_k=1,
        packing=_ENCODER_DECODER,
        compiles="no: the plain model raises while it is traced",
        note=f"decoder only; {_DROPS}",
    ),
    _tried(
        "unlimited_ocr",
        model_types=("unlimited_ocr_text",),
        config=_ONE_DENSE,
        packing=Packing(None, "its attention always sees the prompt at the start of the row"),
    ),
    Family(
        "vitpose_backbone",
        no_router="chooses its expert by the dataset index that the caller passes: there is nothing to replay",
    ),
    _tried(
        "zaya",
        config=ConfigRules(skip_classes=1),
        packing=_STATE,
        note="the last id is its skip class",
    ),
)

UNKNOWN = Family("")
"""What is known of a family that has no record: nothing differs, and nothing was tried."""

_BY_FOLDER = {family.name: family for family in FAMILIES}
_BY_MODEL_TYPE = {key: family for family in FAMILIES for key in family.model_types or (family.name,)}
_BY_CLASS = {key: family for family in FAMILIES for key in family.classes}
_WHERE = {key: where for family in FAMILIES for key, where in family.where.items()}


def by_folder(folder: str) -> Family:
    """Return the family of a `folder` of transformers.models; UNKNOWN if it has no record."""
    return _BY_FOLDER.get(folder, UNKNOWN)


def by_model_type(model_type: str | None) -> Family:
    """Return the family whose text decoder has configs of this `model_type`; UNKNOWN if there is none."""
    return _BY_MODEL_TYPE.get(model_type or "", UNKNOWN)


def by_class(cls: type) -> Family:
    """Return the family of `cls`, a module's class, or of its nearest known base class; UNKNOWN if there is none.

    Base classes matter because FSDP2 and others make subclasses.
    """
    found = (_BY_CLASS.get(base.__name__) or _BY_FOLDER.get(folder_of(base)) for base in cls.__mro__)
    return next((family for family in found if family is not None), UNKNOWN)


def where_router(class_name: str) -> Where:
    """Return how to find the module that chooses, given the class that transformers names as the router."""
    return _WHERE.get(class_name, Where())


def folder_of(cls: type) -> str:
    """Return the folder of transformers.models that defines the class `cls`; empty if it is defined elsewhere."""
    before, _, folder = cls.__module__.partition("transformers.models.")
    return "" if before else folder.partition(".")[0]
