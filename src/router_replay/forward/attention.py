"""Packed attention by sequence lengths, behind transformers' attention interface.

    use_packed_attention(model)          # once; "varlen", "segments", or "masked: " and the reason
    found = logprobs(model, batch)       # each sequence attends to itself, and no mask over the bin is built

The model keeps its earlier attention for every other call: `generate`, padded batches, an image encoder. `logprobs`
gives a pass two arguments: `packed`, the borders of the sequences, and an `attention_mask` of no elements, which
transformers passes on as it is. A layer that got the one without the other raises, and so does a layer that adds this
mask to its scores. The borders travel with the call, so that a layer that is computed again in backward sees those of
its own forward pass.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from router_replay.errors import ReplayError
from router_replay.families import by_folder
from router_replay.families.from_modules import device_of
from router_replay.families.types import NOT_TRIED, YES
from router_replay.forward.inner import decoder_of, inner_model
from router_replay.forward.kernels import KERNELS, Sequences, attention, kernel_for
from router_replay.forward.packing import BY_LENGTHS, attends_by_lengths, folder_of_decoder, why_not_packed

MASKED = "masked"
KINDS = ("auto", *KERNELS, MASKED)
REPLACED = ("sdpa", "eager")  # the attention of transformers that can stand behind this one
_OVER = "_over_"


def use_packed_attention(model: Any, kind: str = "auto", dtype: torch.dtype | None = None) -> str:
    """Let `logprobs` compute the attention of `model` by sequence lengths, and return what it will use.

    `kind` is "varlen", "flash" or "segments" (see router_replay.forward.kernels), "auto" for the fastest that is
    possible, or "masked" for the model's own attention with a mask. `dtype` is the dtype in which the model computes,
    if it is not that of its parameters. The result is the kernel, or "masked: " and the reason.

    Raises ReplayError if the kind is not possible for this model. Call it again to change the kind.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    found = attention_of(model, kind, dtype)
    inner, decoder = inner_model(model), decoder_of(model)
    if decoder is None:
        return found
    before = _before(decoder)
    if found.startswith(MASKED):
        if attends_by_lengths(decoder):
            inner.set_attn_implementation(before)
        return found
    name = name_of(kind, before)
    AttentionInterface.register(name, functools.partial(packed_attention, kind, before))
    AttentionMaskInterface.register(name, _masks_of(before))
    inner.set_attn_implementation(name)
    if decoder.config._attn_implementation != name:
        raise ReplayError(
            f"{type(decoder).__name__} does not take its attention from transformers' interface, but its family's "
            f'record says so: set attention to "{MASKED}"'
        )
    return found


def name_of(kind: str, before: str) -> str:
    """Return the name of the attention `kind` over the attention `before` in transformers' interface.

    transformers takes a name with "flash" in it for one of its own kernels, and looks for that kernel.
    """
    return f"{BY_LENGTHS}{kind.replace('flash', 'fa')}{_OVER}{before}"


def attention_of(model: Any, kind: str = "auto", dtype: torch.dtype | None = None) -> str:
    """Return what `use_packed_attention` would use for these arguments, and change nothing."""
    if kind not in KINDS:
        raise ReplayError(f"attention must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == MASKED:
        return f"{MASKED}: as set"
    decoder = decoder_of(model)
    reason = why_masked(model)
    if not reason and _before(decoder) not in REPLACED:
        reason = f"its attn_implementation is {_before(decoder)!r}, not one of {', '.join(REPLACED)}"
    if reason:
        if kind == "auto":
            return f"{MASKED}: {reason}"
        raise ReplayError(f'attention "{kind}" is not possible for {type(inner_model(model)).__name__}: {reason}')
    dtype = dtype or next((one.dtype for one in decoder.parameters() if one.is_floating_point()), torch.float32)  # type: ignore[union-attr]
    special = by_folder(folder_of_decoder(decoder)).sinks
    return kernel_for(device_of(model) or torch.device("cpu"), dtype, special=special, wanted=kind)


def why_masked(model: Any) -> str:
    """Return why the attention of `model` needs a mask; empty if sequence lengths are enough."""
    if reason := why_not_packed(model):
        return f"its sequences run one at a time ({reason})"
    decoder = decoder_of(model)
    assert decoder is not None  # why_not_packed has a reason without one
    family = by_folder(folder_of_decoder(decoder))
    if family.attention != YES:
        return NOT_TRIED if family.attention == NOT_TRIED else family.attention.removeprefix("no: ")
    config = decoder.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "it attends within chunks of a sequence"
    if getattr(config, "attention_dropout", None):
        return f"attention_dropout is {config.attention_dropout}"
    return ""


def packed_attention(
    kind: str,
    before: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed: Sequences | None = None,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute attention within each sequence of `packed`; without it, call the attention `before`.

    `kind` is the kernel, or "auto". The other arguments are those of transformers' attention interface.
    """
    given = attention_mask is not None and attention_mask.numel() == 0
    if packed is None and not given:
        arguments = {**others, "dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        arguments |= {name: it for name, it in (("softcap", softcap), ("s_aux", s_aux)) if it is not None}
        return _function_of(before, module)(module, query, key, value, attention_mask, **arguments)
    if packed is None or not given:
        raise ReplayError(
            f"{type(module).__name__} got {'no' if packed is None else 'its'} sequence borders and "
            f"{'no' if attention_mask is None else 'an empty' if given else 'another'} mask: expected both as "
            "`logprobs` gave them to the model. Something between drops or changes the arguments `packed` and "
            f'`attention_mask`; make it pass them on, or set attention to "{MASKED}"'
        )
    if dropout or others.get("position_bias") is not None:
        raise ReplayError(
            f"packed attention has no dropout and no position bias, and {type(module).__name__} asks for "
            f'{f"dropout {dropout}" if dropout else "a bias"}: set attention to "{MASKED}"'
        )
    if not torch.compiler.is_compiling():
        packed.attention_calls += 1
    found = attention(
        query, key, value, packed, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux, wanted=kind
    )
    return found, None


def _before(decoder: Any) -> str:
    """Return the attention of the decoder that stands behind the packed one, or is in its place."""
    name = decoder.config._attn_implementation or "sdpa"
    return name.partition(_OVER)[2] if attends_by_lengths(decoder) else name


def _function_of(before: str, module: torch.nn.Module) -> Any:
    """Return transformers' attention function; "eager" is defined in the modelling file of each family."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if before != "eager":
        return ALL_ATTENTION_FUNCTIONS[before]
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))  # type: ignore[union-attr]


def _masks_of(before: str) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[before]
