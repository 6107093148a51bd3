"""Where a family keeps its choice of experts, and how it chooses, as far as it differs from the rest.

Nearly all families say which class is their router (`_can_record_outputs["router_logits"]`) and choose
in its `forward`, with one `topk` over all experts. This file is the list of those that do otherwise.
"""

from __future__ import annotations

import dataclasses
import enum


class Choice(enum.Enum):
    """Which operation of the router is the choice of experts."""

    TOP_K = "topk over all experts"
    GROUPED = "topk over groups of experts, then topk over the experts of the chosen groups"
    SPARSE_MIXER = "one max per slot, each over what the slots before left (phimoe)"
    ARGMAX = "one argmax per slot (nllb_moe, switch_transformers)"
    PRODUCT_KEYS = "topk over two halves of a key, then topk over their product (doge)"


@dataclasses.dataclass(frozen=True)
class Where:
    """How to get from the class a family names as its router to the module that chooses."""

    child: str = ""  # the chooser is this submodule
    parent: bool = False  # the chooser is the module that holds the named one
    method: str = "forward"
    skip: bool = False  # the chooser is found by another class of the same family


# By the name of the class that `_can_record_outputs` names. FSDP2 puts a subclass in front of a module's
# class, so names are looked for along the whole inheritance.
WHERE: dict[str, Where] = {
    "DbrxRouter": Where(parent=True, method="route_tokens_to_experts"),
    "Ernie4_5_VLMoeMoeBlock": Where(child="text_moe.gate"),  # its vision_moe routes image tokens by themselves
    "JetMoeAttention": Where(skip=True),  # its JetMoeTopKGating is named too
}
# jamba names nn.Linear under this attribute; the module that holds it chooses.
WHERE_LINEAR = Where(parent=True, method="route_tokens_to_experts")

CHOICES: dict[str, Choice] = {
    "DogeCDMoE": Choice.PRODUCT_KEYS,
    "NllbMoeTop2Router": Choice.ARGMAX,
    "PhimoeTopKRouter": Choice.SPARSE_MIXER,
    "SwitchTransformersTop1Router": Choice.ARGMAX,
}
ORDERED = ("NllbMoeTop2Router", "PhimoeTopKRouter")  # slot order is meaning: the slots are filled by different rules
FIXED_TOP_K = {"NllbMoeTop2Router": 2, "SwitchTransformersTop1Router": 1}

# The width of the tensor that is chosen from, most telling name first: zaya can choose to skip, longcat_flash
# has experts that compute nothing, and both count these only here.
WIDTH_ATTRIBUTES = ("num_router_classes", "n_routed_experts", "num_experts")
TOP_K_ATTRIBUTES = ("top_k",)
CONFIG_WIDTH = ("num_experts",)  # gemma4 and diffusion_gemma keep the numbers in their config alone
CONFIG_TOP_K = ("top_k_experts",)

# Parts of a module's path that say: not the text decoder. An encoder is left out only where a decoder is there too.
NOT_DECODER = {
    "vision": "routes image patches",
    "visual": "routes image patches",
    "audio": "routes audio frames",
    "talker": "speaks what the decoder wrote; wrap model.talker itself to replay it",
    "mtp": "a multi-token prediction head",
    "nextn": "a multi-token prediction head",
    "draft": "a draft head",
    "assistant": "a draft head",
}
ENCODER = "routes the prompt of an encoder-decoder; rows belong to decoder tokens"

# Decoders whose cache holds the encoder's tokens and none of their own: a filled one says nothing about earlier rows.
CACHE_OF_THE_ENCODER = ("DiffusionGemmaDecoderModel",)

# What wrappers of a part of a model add to the paths below it: torch.compile, FSDP1, activation checkpointing, PEFT.
WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")

# Where a layer holds two routers, the order in which its forward calls them.
CALL_ORDER = ("self_attention", "self_attn", "mlp")
