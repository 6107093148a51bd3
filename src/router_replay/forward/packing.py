"""Build the arguments that keep packed sequences from attending to each other, or refuse the model.

Most models of transformers detect the borders from position ids that restart at 0. Some families build their masks
without position ids, which silently mixes sequences; some carry state along the sequence by other means than
attention. The record of a family says which, and tests/forward/test_packing.py compares every family with runs of one
sequence at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from router_replay.errors import ReplayError
from router_replay.families import Borders, by_folder, folder_of
from router_replay.forward.inner import decoder_of, inner_model
from router_replay.forward.kernels import Sequences

BY_LENGTHS = "router_replay_packed_"
"""How the names of this package's packed attention begin in transformers' attention interface."""

# The kinds of layer for which packing is safe; any other kind is refused, also in families without a record.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def why_not_packed(model: Any) -> str:
    """Return why this model must be given one sequence at a time; empty if packed sequences are safe."""
    return _why_not_packed(decoder_of(model))


def packed_arguments(
    model: Any, token_ids_1T: torch.Tensor, position_ids_1T: torch.Tensor, boundaries: Sequence[int] = ()
) -> dict[str, Any]:
    """Return `input_ids`, `position_ids` and, if the family or its attention needs them, a mask and borders.

    `boundaries` are the sequence borders of the whole bin, known on the host. Without them the position ids are read,
    which waits for their device. Raises ReplayError if the model cannot keep packed sequences apart.
    """
    arguments: dict[str, Any] = {"input_ids": token_ids_1T, "position_ids": position_ids_1T}
    decoder = decoder_of(model)
    is_whole = bool(boundaries) and boundaries[-1] == token_ids_1T.shape[-1]
    by_lengths = is_whole and attends_by_lengths(decoder)
    if not by_lengths and not _several(position_ids_1T, boundaries):
        return arguments
    folder, reason = folder_of_decoder(decoder), _why_not_packed(decoder)
    if reason:
        raise ReplayError(
            f"{folder or type(inner_model(model)).__name__} does not keep packed sequences apart ({reason}): "
            "run one sequence at a time, pack([sample], max_tokens)"
        )
    packing = by_folder(folder).packing
    if packing is not None and packing.borders is Borders.FOUR_ROWS:
        arguments["position_ids"] = position_ids_1T[None].expand(4, -1, -1)
    if by_lengths:
        # 4 dimensions: a mask that is ready. No elements: it fits no scores, so that nobody can use it by mistake.
        arguments["attention_mask"] = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=token_ids_1T.device)
        arguments["packed"] = Sequences(boundaries, token_ids_1T.device)
    elif packing is not None and packing.borders is Borders.MASKS:
        arguments["attention_mask"] = _masks(decoder, token_ids_1T, position_ids_1T)
    return arguments


def attends_by_lengths(decoder: Any) -> bool:
    """Return whether `use_packed_attention` changed the attention of this decoder."""
    name = getattr(getattr(decoder, "config", None), "_attn_implementation", None) or ""
    return name.startswith(BY_LENGTHS)


def is_packed(position_ids_1T: torch.Tensor) -> bool:
    """Return whether a sequence starts after the first slot. A piece of a batch may begin inside a sequence."""
    return bool((position_ids_1T[:, 1:] == 0).any())


def _several(position_ids: torch.Tensor, boundaries: Sequence[int]) -> bool:
    if boundaries:
        return len(boundaries) > 2
    return is_packed(position_ids.reshape(-1, position_ids.shape[-1])[:1])


@contextlib.contextmanager
def reaching_the_decoder(model: Any, arguments: dict[str, Any], boundaries: Sequence[int] = ()) -> Iterator[None]:
    """Make passes in this block raise ReplayError if a wrapper drops the arguments that keep sequences apart.

    `arguments` are those of `packed_arguments` for the same `boundaries`. Compiled code is not checked: it passes the
    same arguments as the same wrapper does uncompiled.
    """
    if "packed" not in arguments and not _several(arguments["position_ids"], boundaries):
        yield
        return
    decoder = decoder_of(model)
    assert decoder is not None  # packed_arguments raises if it is None

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for name in ("position_ids", "attention_mask", "packed"):
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
    _check_attention_calls(model, decoder, arguments.get("packed"))


def _check_attention_calls(model: Any, decoder: Any, packed: Sequences | None) -> None:
    """Raise ReplayError if a layer of the finished pass did not use its `packed` argument.

    Compiled layers do not count their calls: a layer without the argument raises while it is compiled.
    """
    layers = decoder.config.get_text_config().num_hidden_layers
    if packed is None or packed.attention_calls >= layers or _has_compiled_parts(model):
        return
    raise ReplayError(
        f"all {layers} layers must attend by sequence lengths, got {packed.attention_calls} calls of this attention: "
        'the other layers did not see where sequences begin. Set the attention to "masked"'
    )


def _has_compiled_parts(model: Any) -> bool:
    return any(
        isinstance(part, OptimizedModule) or getattr(part, "_compiled_call_impl", None) is not None
        for part in model.modules()
    )


def _arrived(given: Any, got: Any) -> bool:
    if got is given:
        return True
    if isinstance(given, dict):
        return isinstance(got, dict) and got.keys() == given.keys()
    if not isinstance(given, torch.Tensor) or not isinstance(got, torch.Tensor):
        return False
    if got.shape[-1:] != given.shape[-1:]:
        return False
    if got.data_ptr() == given.data_ptr() and got.stride(-1) == given.stride(-1):
        return True  # the same memory: nothing to read, and no wait for the device
    return bool((got == given.reshape(-1, given.shape[-1])[0].to(got.device)).all())


def folder_of_decoder(decoder: Any) -> str:
    """Return the transformers folder that defines the decoder's class; empty if transformers does not define it.

    The result is empty also for a third-party subclass, since its attention may differ. The subclass that FSDP2
    puts in front of a module's class is skipped.
    """
    return folder_of(next(cls for cls in type(decoder).__mro__ if not cls.__module__.startswith("torch.")))


def _why_not_packed(decoder: Any) -> str:
    folder = folder_of_decoder(decoder)
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
