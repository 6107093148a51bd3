"""Find the sequences of a forward pass in its own inputs: tokens, attention mask, position ids and borders.

Two sequences, [5, 6, 7] and [8, 9], as trainers pass them:

    padded left     input_ids [[5, 6, 7], [0, 8, 9]]   attention_mask [[1, 1, 1], [0, 1, 1]]   slots 0-2 and 4-5
    padded right    input_ids [[5, 6, 7], [8, 9, 0]]   attention_mask [[1, 1, 1], [1, 1, 0]]   slots 0-2 and 3-4
    packed          input_ids [[5, 6, 7, 8, 9]]        position_ids   [[0, 1, 2, 0, 1]]        slots 0-2 and 3-4

A slot is a place in the flattened batch; a router gets the tokens in this order. Shapes: B batch rows, S their width, T
slots, N slots that are no padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from router_replay.errors import ReplayError

TOKENS = ("input_ids", "decoder_input_ids")
MASKS = ("attention_mask", "decoder_attention_mask")
BORDERS = ("cu_seq_lens_q", "cu_seqlens")  # of flash attention in transformers, and of families with their own kernels


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Holds the flattened tokens of a pass, and the slots of each sequence: a slice where they lie side by side.

    `width` is that of a batch row, `masked` says whether the pass has a mask of its padding.
    """

    tokens_T: np.ndarray
    sequences: tuple[slice | np.ndarray, ...]
    width: int
    masked: bool
    device: torch.device

    def __len__(self) -> int:
        return len(self.tokens_T)


def layout_of(inputs: dict[str, Any]) -> Layout:
    """Return the layout of a pass from the arguments of the decoder, by name.

    The tensors are read from their device in one go. Raises ReplayError if the tokens are not there or not [B, S].
    """
    tokens = next((inputs[name] for name in TOKENS if isinstance(inputs.get(name), Tensor)), None)
    if tokens is None:
        raise ReplayError(
            "the decoder got no input_ids in this pass, and its rows are found by them: call the model with input_ids "
            "instead of inputs_embeds, or use replay(batch)"
        )
    if tokens.ndim == 1:
        tokens = tokens[None]
    if tokens.ndim != 2:
        raise ReplayError(f"input_ids must be [batch, sequence], got {list(tokens.shape)}")
    mask = next((inputs[name] for name in MASKS if isinstance(inputs.get(name), Tensor)), None)
    packed = getattr(inputs.get("packed"), "boundaries", None)  # the borders that logprobs() passes, on the host
    borders = next((inputs[name] for name in BORDERS if inputs.get(name) is not None), packed)
    shape = tuple(tokens.shape)
    mask_BS = _mask_of(mask, shape)
    positions_BS = _positions_of(inputs.get("position_ids"), shape)
    ends = None if borders is None else _on_host(borders).reshape(-1)
    return Layout(
        tokens_T=_on_host(tokens).reshape(-1).astype(np.int64, copy=False),
        sequences=sequences_of(shape, mask_BS, positions_BS, ends),
        width=shape[1],
        masked=mask_BS is not None,
        device=tokens.device,
    )


def sequences_of(
    shape: tuple[int, ...],
    mask_BS: np.ndarray | None,
    positions_BS: np.ndarray | None,
    borders: np.ndarray | Sequence[int] | None,
) -> tuple[slice | np.ndarray, ...]:
    """Return the slots of each sequence, in the order of its first slot.

    `shape` is [B, S]. `mask_BS` is 0 in padding; values above 1 number the sequences of a row. In `positions_BS` a
    sequence goes up by one from token to token; padding between two of its tokens may count or not. `borders` are the
    ends of sequences over all slots, from 0 on; if they are given, positions are not looked at.
    """
    rows, width = shape
    slots_N = np.arange(rows * width) if mask_BS is None else np.flatnonzero(mask_BS)
    if not len(slots_N):
        return ()
    begins_N = np.ones(len(slots_N), bool)
    row_N = slots_N // width
    begins_N[1:] = row_N[1:] != row_N[:-1]
    if mask_BS is not None and mask_BS.max() > 1:
        number_N = mask_BS.reshape(-1)[slots_N]
        begins_N[1:] |= number_N[1:] != number_N[:-1]
    if borders is not None:
        piece_N = np.searchsorted(borders, slots_N, side="right")
        begins_N[1:] |= piece_N[1:] != piece_N[:-1]
    elif positions_BS is not None:
        position_N = positions_BS.reshape(-1)[slots_N]
        step = position_N[1:] - position_N[:-1]
        begins_N[1:] |= (step != 1) & (step != slots_N[1:] - slots_N[:-1])
    first = np.flatnonzero(begins_N)
    ends = np.append(first[1:], len(slots_N))
    found: list[slice | np.ndarray] = []
    for start, end in zip(first.tolist(), ends.tolist(), strict=True):
        low, high = int(slots_N[start]), int(slots_N[end - 1]) + 1
        found.append(slice(low, high) if high - low == end - start else slots_N[start:end])
    return tuple(found)


def _mask_of(mask: Tensor | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a mask of padding, [B, S]; None if there is none. A mask over pairs of tokens does not name padding."""
    if mask is None or mask.ndim != 2:
        return None
    if tuple(mask.shape) != shape:
        raise ReplayError(f"attention_mask must have the shape of input_ids, {list(shape)}, got {list(mask.shape)}")
    return _on_host(mask if not mask.is_floating_point() else mask != 0).astype(np.int64)


def _positions_of(positions: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the text positions, [B, S]; None if they are not given.

    Families that place images have a row of positions for each axis. The first of four rows is that of the text. With
    three, the first is the time, which stands still within an image, so that only a return to 0 begins a sequence.
    Position ids of one row stand for all rows of the batch.
    """
    if not isinstance(positions, Tensor):
        return None
    found = _on_host(positions)
    axes = len(found) if found.ndim == 3 else 0
    found = found[0] if axes else found
    if found.ndim > 2 or found.shape[-1] != shape[1] or found.size not in (shape[1], shape[0] * shape[1]):
        raise ReplayError(f"position_ids must fit input_ids, {list(shape)}, got {list(positions.shape)}")
    found_BS = np.broadcast_to(found, shape)
    return _counted_from_zeros(found_BS) if axes == 3 else found_BS


def _counted_from_zeros(time_BS: np.ndarray) -> np.ndarray:
    """Return positions that count up by one, and begin anew where the time returns to 0."""
    place_BS = np.broadcast_to(np.arange(time_BS.shape[1]), time_BS.shape)
    returns_BS = (time_BS == 0) & (np.roll(time_BS, 1, axis=1) != 0) & (place_BS > 0)
    return place_BS - np.maximum.accumulate(np.where(returns_BS, place_BS, 0), axis=1)


def _on_host(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
