"""Implements the key-value cache of sequences of different lengths that decode together.

Sequences are aligned at their last token; shorter ones have empty slots on the left, which the attention mask hides.

    lengths [3, 5]     . . a b c
                       d e f g h

A prompt is computed without padding and joins afterwards, so no pass ever sees a padding token: every row that the
routers record is the row of a real token. A sliding-window layer keeps only its last slots, aligned in the same way.

Shapes: B sequences, H key heads, S slots, D size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from router_replay.families.records import MIXES_TOKENS, by_model_type


def why_one_at_a_time(config: Any) -> str:
    """Return the reason why sequences of this model cannot share a cache; empty if they can."""
    if by_model_type(config.model_type).mixes_tokens:
        return MIXES_TOKENS
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    if "chunked_attention" in (types or ()) or (types is None and getattr(text, "attention_chunk_size", None)):
        return "its chunked attention counts positions by the slots of the cache, including padding"
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        return f"its attention of type {error} uses a cache of another kind"
    for number, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"the cache of its layer {number} ({type(layer).__name__}) does not have one slot per token"
    return ""


class RaggedCache:
    """Wraps a DynamicCache and tracks the length of each sequence; empty slots are only on the left."""

    def __init__(self, cache: DynamicCache | None = None, lengths: list[int] | None = None) -> None:
        self.cache = cache
        self.lengths = lengths or []

    @property
    def width(self) -> int:
        """The length of the longest sequence, which is the number of slots."""
        return max(self.lengths, default=0)

    def positions(self, device: Any) -> Any:
        """Return the position of the next token of each sequence, [B, 1]."""
        return torch.tensor(self.lengths, device=device)[:, None]

    def mask(self, device: Any) -> Any:
        """Return which slots each sequence may attend to in the next pass, [B, S + 1]; None if no slot is empty."""
        if min(self.lengths) == self.width:
            return None
        first_B1 = self.width - torch.tensor(self.lengths, device=device)[:, None]
        return (torch.arange(self.width + 1, device=device) >= first_B1).long()

    def advance(self) -> None:
        """Count one more token in every sequence, after a pass has added it."""
        self.lengths = [length + 1 for length in self.lengths]

    def join(self, other: RaggedCache) -> None:
        """Append the sequences of another cache. The other cache must not be used afterwards."""
        if self.cache is None or not self.lengths:
            self.cache, self.lengths = other.cache, other.lengths
            return
        assert other.cache is not None
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            if not mine.is_initialized:  # a layer that shares another layer's keys stores none
                continue
            mine.keys = _below(mine.keys, theirs.keys)
            mine.values = _below(mine.values, theirs.values)
            if isinstance(mine, DynamicSlidingWindowLayer):
                mine.cumulative_length = max(mine.cumulative_length, theirs.cumulative_length)
        self.lengths = self.lengths + other.lengths

    def select(self, index: list[int]) -> None:
        """Keep the sequences in `index`, in this order; an index may repeat. Removes slots that are empty in all."""
        if index == list(range(len(self.lengths))):
            return
        if not index:
            self.cache, self.lengths = None, []
            return
        assert self.cache is not None
        before = self.width
        self.lengths = [self.lengths[i] for i in index]
        unused = before - self.width
        for layer in self.cache.layers:
            if layer.is_initialized:
                _select(layer, index, unused)


def _below(upper_BHSD: Any, lower_BHSD: Any) -> Any:
    slots = max(upper_BHSD.shape[-2], lower_BHSD.shape[-2])
    return torch.cat([_widen(upper_BHSD, slots), _widen(lower_BHSD, slots)])


def _widen(states_BHSD: Any, slots: int) -> Any:
    missing = slots - states_BHSD.shape[-2]
    return torch.nn.functional.pad(states_BHSD, (0, 0, missing, 0)) if missing else states_BHSD


def _select(layer: Any, index: list[int], unused: int) -> None:
    width = layer.keys.shape[-2]
    slots = width - unused
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length -= unused
        slots = min(width, layer.cumulative_length)  # tokens outside the window were already removed
    rows = torch.tensor(index, device=layer.keys.device)
    layer.keys = layer.keys[:, :, width - slots :].index_select(0, rows)
    layer.values = layer.values[:, :, width - slots :].index_select(0, rows)
