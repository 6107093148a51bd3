"""Loads new weights into a running model. They are read and checked first, so that a wrong source changes nothing.

A folder is loaded by transformers, which maps the names and expert tensors of a checkpoint to those of the module. It
is read into host memory beside the running model, and then copied in place. Lazy tensors are checked by their shapes
and read one at a time while they are copied.
"""

from __future__ import annotations

import copy
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from router_replay.engines.lazy_tensors import LazyTensors, like_of
from router_replay.errors import EngineError, shorten
from router_replay.forward.inner import inner_model
from router_replay.model_building import BUILDING

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Any  # Any stands for an nn.Module


def refuse_folder(source: Any) -> None:
    """Raise EngineError for an unusable folder: a cheap check before any request in flight is affected."""
    if isinstance(source, Mapping | nn.Module):
        return
    if not isinstance(source, str | os.PathLike):
        raise EngineError(
            f"weights must be the path of a Hugging Face folder, a state dict or a module, got {type(source).__name__}"
        )
    if not any(pathlib.Path(source).glob("*.safetensors")):
        raise EngineError(
            f"no .safetensors file in {os.fspath(source)}: expected a Hugging Face folder, as save_pretrained writes it"
        )


def stage(model: Any, source: Source) -> Mapping[str, Any]:
    """Return a tensor of the right shape for every name in the model's state dict; lazy tensors stay lazy.

    Raises EngineError with the reason if the source does not fit.
    """
    if isinstance(source, nn.Module):
        return _fitting(model, inner_model(source).state_dict(), type(source).__name__)
    if isinstance(source, Mapping):
        return _fitting(model, source, "the state dict")
    folder = os.fspath(source)
    try:
        with BUILDING:
            loaded, info = type(model).from_pretrained(
                folder,
                config=copy.deepcopy(model.config),  # the running model's config, so that the folder needs only weights
                generation_config=copy.deepcopy(getattr(model, "generation_config", None)),
                dtype=_widest(model),
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise EngineError(f"the weights of {folder} could not be loaded: {type(error).__name__}: {error}") from error
    wrong = [
        f"{what} {shorten(sorted(map(str, info.get(key) or ())))}" for what, key in _WRONG.items() if info.get(key)
    ]
    if wrong:
        raise EngineError(f"the weights of {folder} do not fit {type(model).__name__}: {'; '.join(wrong)}")
    return _fitting(model, loaded.state_dict(), folder)


def _widest(model: Any) -> torch.dtype:
    """Return float32 if a part of the model is float32, such as its routers; `copy_in_place` rounds for the others."""
    in_float32 = any(parameter.dtype is torch.float32 for parameter in model.parameters())
    return torch.float32 if in_float32 else model.dtype


def copy_in_place(model: Any, tensors: Mapping[str, Any]) -> None:
    """Copy staged tensors into the model's own, which keeps their memory, dtype and device."""
    with torch.no_grad():
        for name, target in model.state_dict().items():
            target.copy_(tensors[name])


_WRONG = {
    "missing": "missing_keys",
    "unexpected": "unexpected_keys",
    "of another shape": "mismatched_keys",
    "failed": "error_msgs",
}


def _fitting(model: Any, tensors: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    wanted, like = model.state_dict(), like_of(tensors)
    found = {name: name for name in wanted if name in like}
    for name in wanted.keys() - found.keys():  # a tied tensor has two names, and a source may give only one
        twin = next((other for other in found if wanted[other].data_ptr() == wanted[name].data_ptr()), None)
        if twin is not None and wanted[name].numel():
            found[name] = found[twin]
    wrong = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": like.keys() - wanted.keys(),
        "of another shape": {name for name, given in found.items() if like[given].shape != wanted[name].shape},
    }
    if any(wrong.values()):
        said = "; ".join(f"{what} {shorten(sorted(names))}" for what, names in wrong.items() if names)
        raise EngineError(f"the weights of {where} do not fit {type(model).__name__}: {said}")
    if isinstance(tensors, LazyTensors):
        return LazyTensors({name: like[given] for name, given in found.items()}, lambda name: tensors[found[name]])
    return {name: tensors[given] for name, given in found.items()}
