"""NativeSite holds the rows that a caller gave to one object of Megatron's RouterReplay, and the checks of such rows.

Shapes: T tokens of this rank, K top-k.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from router_replay.errors import ReplayError, shorten

MISSING = -1  # in every slot of a row: the row is not known, and is routed live
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)


@dataclasses.dataclass(eq=False)
class NativeSite:
    """Holds what is known of one object of Megatron's RouterReplay.

    `owner` is the router that has it, `top_k` and `experts` are its numbers (0: not known yet). `ids_TK` are the rows
    of the next forward pass as the caller gave them, None if there are none or a forward pass has used them;
    `missing` is the number of missing rows among them (None: the rows wait for a check of their range). `used` has the
    ids that the forward of each checkpoint used, while its graph is alive; those in `waiting` were not recomputed yet.
    """

    owner: weakref.ref[Any] | None = None
    top_k: int = 0
    experts: int = 0
    ids_TK: Tensor | None = None
    missing: int | None = 0
    used: weakref.WeakKeyDictionary[Any, Any] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    waiting: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    passes: int = 0
    rows_replayed: int = 0
    rows_live: int = 0

    def bind(self, router: Any) -> None:
        """Note the router that has this object."""
        self.owner = weakref.ref(router)
        self.top_k, self.experts = router.topk, router.config.num_moe_experts

    @property
    def router(self) -> Any:
        """The router that has this object, None if it is not known."""
        return None if self.owner is None else self.owner()

    @property
    def layer(self) -> int | None:
        """The id of the router's decoder layer, None if it is not known."""
        router = self.router
        return None if router is None or router.layer_number is None else router.layer_number - 1


def refuse_form(rows: Any, site: NativeSite, name: str) -> None:
    """Raise ReplayError unless `rows` are a tensor [T, K] of integers, K being that of the router if it is known."""
    width = site.top_k or "top_k"
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.dtype not in INTEGERS:
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ReplayError(f"{name}: the rows must be a tensor [tokens, {width}] of integers, got {got}")
    if site.top_k and rows.shape[1] != site.top_k:
        raise ReplayError(f"{name}: each row must have {site.top_k} experts (moe_router_topk), got {rows.shape[1]}")


def missing_rows(sites: Sequence[NativeSite], names: Sequence[str], all_rows: Sequence[Tensor]) -> list[int]:
    """Return the number of missing rows of each router; raise ReplayError for the first row that no router chooses."""
    found = [_faults(rows, site.experts) for site, rows in zip(sites, all_rows, strict=True)]
    if not found:
        return []
    counts = torch.stack([torch.stack([mask.sum() for mask in masks]) for masks in found]).tolist()
    for site, name, rows, masks, (_, outside, twice) in zip(sites, names, all_rows, found, counts, strict=True):
        if outside or twice:
            row = int((masks[1] | masks[2]).nonzero()[0])
            ids = rows[row].tolist()
            reason = "an expert stands twice in it" if masks[2][row] else "an id is out of range"
            raise ReplayError(
                f"{name}, row {row}: expected {len(ids)} different ids of {site.experts or 'the'} experts, or "
                f"{MISSING} in every slot for a row that is not known, got [{shorten(ids)}]: {reason}"
            )
    return [missing for missing, _, _ in counts]


def _faults(rows: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three masks [T]: missing rows, rows with an id outside of the experts, rows with an expert twice."""
    wide = rows.long()
    missing = (wide == MISSING).all(1)
    outside = (wide < 0) | (wide >= experts) if experts else wide < 0
    in_order = wide.sort(1).values
    twice = (in_order[:, 1:] == in_order[:, :-1]).any(1)
    return missing, outside.any(1) & ~missing, twice & ~missing


def narrow(ids: Tensor, experts: int) -> Tensor:
    """Return `ids` in the smallest dtype that holds the ids of this many `experts` and can be gathered on a GPU."""
    return ids.to(torch.uint8 if experts <= 1 << 8 else torch.int16 if experts <= 1 << 15 else torch.int32)
