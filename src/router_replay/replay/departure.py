"""Say which sequence of a pass is not in the store, where it departs from the nearest one, and what to do."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from router_replay.errors import ReplayError, shorten
from router_replay.replay.layout import Layout
from router_replay.store import RouteStore

ADVICE = (
    "Add its routes before the pass, with the tokens that the engine used (text that is tokenised again can give other "
    'tokens), or pass on_missing="live" to route it live and count it'
)


def departure(store: RouteStore, layout: Layout, number: int, slots: slice | np.ndarray, key: Hashable) -> ReplayError:
    """Return the error for sequence `number` of a pass, whose tokens are in these `slots` of the `layout`.

    `key` is the key that the host gave, or None.
    """
    tokens = layout.tokens_T[slots]
    first = slots.start if isinstance(slots, slice) else int(slots[0])
    row, column = divmod(first, layout.width)
    left = f" {store.evicted} sequences have left the store: raise its max_bytes." if store.evicted else ""
    return ReplayError(
        f"sequence {number} of this pass ({len(tokens)} tokens, batch row {row}, from column {column} on) is not in "
        f"the store: {_difference(store, tokens, key, layout.masked)}.{left} {ADVICE}"
    )


def _difference(store: RouteStore, tokens: np.ndarray, key: Hashable, masked: bool) -> str:
    if key is not None and store.find(tokens) is not None:
        known = shorten([repr(one) for one in store.keys(tokens)])
        return f"its tokens are, but not with the key {key!r} (keys of these tokens: {known or 'of longer ones only'})"
    nearest = store.nearest(tokens)
    if nearest is None:
        return "the store is empty"
    at = nearest.shared
    if at < len(nearest.tokens):
        return (
            f"it departs from the nearest of {len(store)} stored sequences at token {at}, where the stored one of "
            f"{len(nearest.tokens)} tokens has {nearest.tokens[at]} and this one has {tokens[at]}"
        )
    text = f"the nearest of {len(store)} stored sequences ends at token {at}, and this one goes on with {tokens[at]}"
    rest = tokens[at:]
    if not masked and (rest == rest[0]).all():
        text += f" up to its end; if that is padding, pass an attention_mask, or pad_token_id={rest[0]} to follow()"
    return text
