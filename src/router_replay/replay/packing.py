"""Packed sequences must not see each other: what each family needs for that, and which families cannot do it.

Most of transformers reads the borders off position ids that start anew. Some families build their masks
without them, which mixes sequences in silence; some carry state along the sequence by other means than
attention. tests/replay/test_packing.py holds every family against one sequence at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from router_replay.errors import ReplayError

_STATE = "carries state along the sequence by recurrence or convolution"
_INDEX = "its attention picks keys by an index over the whole row"
NOT_PACKED = {
    "axk2": _INDEX,
    "deepseek_v32": _INDEX,
    "deepseek_v4": "its attention compresses keys over blocks of the row",
    "diffusion_gemma": "an encoder-decoder",
    "doge": "its router mixes the tokens of a batch",
    "glm5_next": _STATE,
    "glm_moe_dsa": _INDEX,
    "granitemoehybrid": _STATE,
    "hy_v4": _INDEX,
    "inkling": _STATE,
    "jamba": _STATE,
    "kimi_linear": _STATE,
    "lfm2_moe": _STATE,
    "minimax": _STATE,
    "nemotron_h": _STATE,
    "nllb_moe": "an encoder-decoder",
    "openai_privacy_filter": "its attention looks ahead",
    "qwen3_5_moe": _STATE,
    "qwen3_next": _STATE,
    "qwen4_exp": _STATE,
    "switch_transformers": "an encoder-decoder",
    "zaya": _STATE,
}
PARTLY_PACKED = {"minimax_m3_vl": "only where no layer is minimax_m3_sparse"}
# What a layer may be for packing to be safe; any other kind is refused, also in families that are not listed.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
MASK_WITHOUT_POSITIONS = ("afmoe", "gpt_oss")
FOUR_ROWS_OF_POSITIONS = ("ernie4_5_vl_moe", "glm4v_moe")  # text, time, height, width: else the mask sees none


def family_of(model: Any) -> str:
    """The name of the transformers folder that the model comes from."""
    module = next((cls.__module__ for cls in type(model).__mro__ if ".models." in cls.__module__), "")
    return module.partition(".models.")[2].partition(".")[0]


def why_not_packed(model: Any) -> str:
    """Why this model must be given one sequence at a time; empty where it may get several."""
    odd_kinds = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - ATTENTION_KINDS)
    return NOT_PACKED.get(family_of(model), f"layers of kind {', '.join(odd_kinds)}" if odd_kinds else "")


def packed_arguments(model: Any, token_ids_1T: torch.Tensor, position_ids_1T: torch.Tensor) -> dict[str, Any]:
    """`input_ids`, `position_ids` and, where the family needs one, a mask; ReplayError where it would be wrong."""
    arguments: dict[str, Any] = {"input_ids": token_ids_1T, "position_ids": position_ids_1T}
    if int((position_ids_1T == 0).sum()) <= 1:
        return arguments
    family, reason = family_of(model), why_not_packed(model)
    if reason:
        raise ReplayError(
            f"{family} does not keep packed sequences apart ({reason}): give it one sequence at a time, "
            "pack([sample], max_tokens)"
        )
    if family in FOUR_ROWS_OF_POSITIONS:
        arguments["position_ids"] = position_ids_1T[None].expand(4, -1, -1)
    elif family in MASK_WITHOUT_POSITIONS:
        arguments["attention_mask"] = _masks(model, token_ids_1T, position_ids_1T)
    return arguments


def _masks(model: Any, token_ids_1T: torch.Tensor, position_ids_1T: torch.Tensor) -> dict[str, Any]:
    weight = model.get_input_embeddings().weight
    shape = (*token_ids_1T.shape, 1)  # only its shape, dtype and device are looked at
    arguments = {
        "config": model.config,
        "inputs_embeds": torch.empty(shape, dtype=weight.dtype, device=token_ids_1T.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids_1T,
    }
    return {
        "full_attention": create_causal_mask(**arguments),
        "sliding_attention": create_sliding_window_causal_mask(**arguments),
    }
