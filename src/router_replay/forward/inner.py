"""Find the transformers model inside a wrapper: torch.compile, DDP, FSDP, PEFT, or any module that holds one.

The family, the config and the output matrix are properties of the inner model. Calls go to the wrapper, so that
its own hooks run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from router_replay.errors import ReplayError
from router_replay.families.from_modules import not_decoder


def inner_model(model: Any) -> Any:
    """Return the outermost transformers model in `model`, or `model` itself if there is none.

    Raises ReplayError if several could be the text decoder.
    """
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    held = dict(_outermost(model, ""))
    decoders = {path: held[path] for path in held if not not_decoder(path)} if len(held) > 1 else held
    if len(decoders) > 1:
        raise ReplayError(
            f"{type(model).__name__} holds {len(decoders)} transformers models ({', '.join(decoders)}), and it is not "
            "clear which one decodes text: pass that one"
        )
    return next(iter(decoders.values()), model)


def decoder_of(model: Any) -> PreTrainedModel | None:
    """Return the transformers model that embeds and decodes the text, such as `GptOssModel`; None if there is none."""
    inner = inner_model(model)
    if not isinstance(inner, PreTrainedModel):
        return None
    try:
        embedding = inner.get_input_embeddings()
    except NotImplementedError:
        return None
    models = [module for module in inner.modules() if isinstance(module, PreTrainedModel)]
    holders = [module for module in models if any(part is embedding for part in module.modules())]
    return holders[-1] if holders else None  # modules() yields outer modules first


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, PreTrainedModel):
            yield f"{path}{name}", child
        else:
            yield from _outermost(child, f"{path}{name}.")
