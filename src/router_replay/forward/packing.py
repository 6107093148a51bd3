"""Build the arguments that keep packed sequences from attending to each other, or refuse the model.

Most models of transformers detect the borders from position ids that restart at 0. Some families build their masks
without position ids, which silently mixes sequences; some carry state along the sequence by other means than
attention. The record of a family says which, and tests/forward/test_packing.py compares every family with runs of one
sequence at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from router_replay.errors import ReplayError
from router_replay.families import Borders, by_folder, folder_of
from router_replay.forward.inner import decoder_of, inner_model

# The kinds of layer for which packing is safe; any other kind is refused, also in families without a record.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def why_not_packed(model: Any) -> str:
    """Return why this model must be given one sequence at a time; empty if packed sequences are safe."""
    return _why_not_packed(decoder_of(model))


def packed_arguments(model: Any, token_ids_1T: torch.Tensor, position_ids_1T: torch.Tensor) -> dict[str, Any]:
    """Return `input_ids`, `position_ids` and, if the family needs one, a mask.

    Raises ReplayError if the model cannot keep packed sequences apart.
    """
    arguments: dict[str, Any] = {"input_ids": token_ids_1T, "position_ids": position_ids_1T}
    if not is_packed(position_ids_1T):
        return arguments
    decoder = decoder_of(model)
    folder, reason = _folder(decoder), _why_not_packed(decoder)
    if reason:
        raise ReplayError(
            f"{folder or type(inner_model(model)).__name__} does not keep packed sequences apart ({reason}): "
            "run one sequence at a time, pack([sample], max_tokens)"
        )
    packing = by_folder(folder).packing
    if packing is not None and packing.borders is Borders.FOUR_ROWS:
        arguments["position_ids"] = position_ids_1T[None].expand(4, -1, -1)
    elif packing is not None and packing.borders is Borders.MASKS:
        arguments["attention_mask"] = _masks(decoder, token_ids_1T, position_ids_1T)
    return arguments


def is_packed(position_ids_1T: torch.Tensor) -> bool:
    """Return whether a sequence starts after the first slot. A piece of a batch may begin inside a sequence."""
    return bool((position_ids_1T[:, 1:] == 0).any())


@contextlib.contextmanager
def reaching_the_decoder(model: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Make passes in this block raise ReplayError if a wrapper drops the arguments that keep sequences apart.

    Compiled code is not checked: it passes the same arguments as the same wrapper does uncompiled.
    """
    positions = arguments["position_ids"]
    if not is_packed(positions.reshape(-1, positions.shape[-1])[:1]):
        yield
        return
    decoder = decoder_of(model)
    assert decoder is not None  # packed_arguments raises if it is None

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for name in ("position_ids", "attention_mask"):
            if name in arguments and not _arrived(arguments[name], kwargs.get(name)):
                raise ReplayError(
                    f"{type(model).__name__} did not pass its {name} unchanged to the decoder "
                    f"({type(decoder).__name__}): packed sequences would attend to each other. Make the wrapper pass "
                    "it on, or run one sequence at a time, pack([sample], max_tokens)"
                )

    hook = decoder.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _arrived(given: Any, got: Any) -> bool:
    if isinstance(given, dict):
        return isinstance(got, dict) and got.keys() == given.keys()
    positions_T = given.reshape(-1, given.shape[-1])[0]
    if not isinstance(got, torch.Tensor) or got.shape[-1:] != positions_T.shape:
        return False
    return bool((got == positions_T.to(got.device)).all())


def _folder(decoder: Any) -> str:
    """Return the transformers folder that defines the decoder's class; empty if transformers does not define it.

    The result is empty also for a third-party subclass, since its attention may differ. The subclass that FSDP2
    puts in front of a module's class is skipped.
    """
    return folder_of(next(cls for cls in type(decoder).__mro__ if not cls.__module__.startswith("torch.")))


def _why_not_packed(decoder: Any) -> str:
    folder = _folder(decoder)
    if not folder:
        return "it has no decoder from transformers.models, so nothing is known of its attention"
    packing = by_folder(folder).packing
    if packing is not None and packing.borders is None:
        return packing.note
    kinds = getattr(decoder.config.get_text_config(), "layer_types", None) or ()
    odd_kinds = sorted(set(kinds) - ATTENTION_KINDS)
    return f"layers of kind {', '.join(odd_kinds)}" if odd_kinds else ""


def _masks(decoder: Any, token_ids_1T: torch.Tensor, position_ids_1T: torch.Tensor) -> dict[str, Any]:
    shape = (*token_ids_1T.shape, 1)  # only its shape, dtype and device are used
    arguments = {
        "config": decoder.config,
        "inputs_embeds": torch.empty(shape, dtype=_dtype(decoder), device=token_ids_1T.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids_1T,
    }
    return {
        "full_attention": create_causal_mask(**arguments),
        "sliding_attention": create_sliding_window_causal_mask(**arguments),
    }


def _dtype(decoder: Any) -> torch.dtype:
    """Return the dtype of the decoder's parameters, or of its config if FSDP1 (flat parameters) leaves none in it."""
    found = next((parameter.dtype for parameter in decoder.parameters() if parameter.is_floating_point()), None)
    return found or decoder.config.dtype or torch.get_default_dtype()
