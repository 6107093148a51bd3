"""Says where each tensor of a Hugging Face checkpoint stands in the tensors of a transformers model.

A model fuses what a checkpoint holds apart: all experts of a layer are one tensor, and `gate_proj` and `up_proj` are
its halves. Every tensor of the checkpoint is then a rectangle of one tensor of the model:

    Piece("model.layers.0.mlp.experts.3.up_proj.weight",       # in the checkpoint, [32, 64]
          "model.layers.0.mlp.experts.gate_up_proj",           # in the model, [16, 64, 64]
          (slice(3, 4), slice(32, 64), slice(0, 64)), (32, 64))

So one tensor of the model can be written to a checkpoint, or read from one, without the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from router_replay.engines.copies import Move, View, joined
from router_replay.errors import EngineError


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tensor `name` of a checkpoint, with this `shape`: the rectangle `place` of the model's tensor `tensor`."""

    name: str
    tensor: str
    place: tuple[slice, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this piece of the model's `tensor`, as a view of it."""
        return tensor[self.place].view(self.shape)


def pieces_of(model: Any) -> list[Piece]:
    """Return the pieces that make up all weights of a transformers `model`, in the order of its state dict.

    The names are those that save_pretrained writes; of tied weights there is one. Only names and shapes of the model
    are used, so it may be sharded or without weights. Raises EngineError if a tensor of the checkpoint is no rectangle
    of one tensor of the model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    kept = set(_written_names(model))
    state = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
    wanted = {name: tensor for name, tensor in state.items() if name in kept}
    with torch.no_grad(), _Views():
        written = revert_weight_conversion(model, dict(wanted))
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in wanted.items()}
    found: dict[str, list[Piece]] = {name: [] for name in wanted}
    for name, view in written.items():
        owner = owners.get(view.untyped_storage()._cdata)
        place = None if owner is None else _place(view, wanted[owner])
        if owner is None or place is None:
            raise EngineError(
                f"{type(model).__name__}: {name} of the checkpoint is no rectangle of one tensor of the model, so "
                "the weights cannot be written one tensor at a time"
            )
        found[owner].append(Piece(name, owner, place, tuple(view.shape)))
    for name, pieces in found.items():
        if sum(wanted[name][piece.place].numel() for piece in pieces) != wanted[name].numel():
            raise EngineError(f"{type(model).__name__}: the checkpoint does not hold all of {name}")
    # In the order of the model's memory, so that neighbours there are neighbours in a file.
    return [piece for pieces in found.values() for piece in sorted(pieces, key=lambda piece: _starts(piece.place))]


def _starts(place: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(one.start for one in place)


def by_tensor(pieces: list[Piece]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor of the model."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor, []).append(piece)
    return found


def in_checkpoint(pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each piece. Each of the model's `tensors` is read once, and not kept."""
    for name, own in by_tensor(pieces).items():
        tensor = tensors[name]
        for piece in own:
            yield piece.name, piece.of(tensor)
        del tensor


def moves_of(pieces: list[Piece], shape: torch.Size, offsets: Mapping[str, int]) -> list[Move]:
    """Return the copies of one tensor of the model, with this `shape`, to the places of its `pieces` in a memory.

    `offsets` say where each piece begins there, in elements; the pieces are contiguous. The fewest copies are made: if
    the pieces lie there as in the model, it is one.
    """
    whole = torch.empty(shape, device="meta")
    moves = []
    for piece in pieces:
        place = View.of(torch.empty(piece.shape, device="meta")).moved(offsets[piece.name])
        moves.append(Move(View.of(piece.of(whole)), place))
    return joined(moves)


class _Views(TorchFunctionMode):
    """Keep what `revert_weight_conversion` cuts out of a tensor a view of it, where it would copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _place(view: torch.Tensor, whole: torch.Tensor) -> tuple[slice, ...] | None:
    """Return the rectangle of the contiguous tensor `whole` that `view` is, or None if it is none."""
    rest, starts = view.storage_offset(), []
    for stride in whole.stride():
        start, rest = divmod(rest, stride)
        starts.append(start)
    sizes = [1] * whole.ndim
    dimension = 0
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        while dimension < whole.ndim and whole.stride(dimension) != stride:
            dimension += 1
        if dimension == whole.ndim:
            return None
        sizes[dimension] = size
        dimension += 1
    if any(start + size > most for start, size, most in zip(starts, sizes, whole.shape, strict=True)):
        return None
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _written_names(model: Any) -> list[str]:
    """Return the names of the state dict that save_pretrained writes: of tied weights those that are not derived."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    derived = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    groups: dict[int, list[str]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in model.state_dict():
        if name not in ignored:
            groups.setdefault(id(tensors[name]), []).append(name)
    return [next((name for name in names if name not in derived), names[0]) for names in groups.values()]
