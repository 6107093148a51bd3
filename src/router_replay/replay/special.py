"""Handle the two routers whose choice is not one operation on one tensor of scores: phimoe's and doge's.

Shapes: T tokens, K top-k, N keys of each half (doge has N * N experts).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from router_replay.families import Choice
from router_replay.families.from_modules import FoundRouter
from router_replay.replay.selection import MAX, SELECTIONS, TOP_K, Selection


class SparseMixerSelection(Selection):
    """Handles the router of phimoe.

    It fills each slot by a max over the experts that earlier slots left, and normalises its weight over the experts
    with a score near the best. A slot calls `max` once in evaluation (threshold and choice), and three times in
    training (threshold, choice by sampling, and the best gate for its gradient estimate, which stays live). The
    threshold masks experts whose score is far below the best. If that would mask the recorded expert, which would
    give it weight zero and no gradient, the recorded expert's own score is the threshold; otherwise the live one is.
    """

    def __init__(self, router: FoundRouter, ids_TK: Tensor | None, live_T1: Tensor | None, compare: bool) -> None:
        super().__init__(router, ids_TK, live_T1, compare)
        self.training = bool(router.module.training)
        self.calls = 0
        self.slots: list[Tensor] = []
        self.live_slots: list[Tensor] = []

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation `func` of the router, with the recorded id of a slot."""
        if func not in MAX or args[0].shape[-1] != self.router.num_experts:
            return func(*args, **kwargs)
        self.offer(args[0])
        values, indices = func(*args, **kwargs)
        per_slot = 3 if self.training else 1
        slot, step = divmod(self.calls, per_slot)
        self.calls += 1
        if slot >= self.router.top_k or step == 2:
            return torch.return_types.max((values, indices))
        keepdim = indices.ndim == args[0].ndim
        live = indices if keepdim else indices.unsqueeze(-1)
        ids = live if self.ids_TK is None else self.mix(self.ids_TK[:, slot : slot + 1], live, args[0])
        if step == 0 and self.ids_TK is not None:
            values = self._threshold(args[0], values, ids)
        if step == (1 if self.training else 0):
            self.slots.append(ids)
            self.live_slots.append(live)
        if len(self.slots) == self.router.top_k:
            self._note(torch.cat(self.slots, -1), torch.cat(self.live_slots, -1))
        return torch.return_types.max((values, ids if keepdim else ids.squeeze(-1)))

    def _threshold(self, scores: Tensor, best: Tensor, ids: Tensor) -> Tensor:
        mine = scores.gather(-1, ids)
        jitter: Any = self.router.module.router_jitter_noise
        masked = ((best - mine) / mine.abs().clamp(min=best)) > 2 * jitter
        return torch.where(masked, mine, best)


class ProductKeySelection(Selection):
    """Handles the router of doge, which sorts both halves of the key, adds every pair, and takes the topk of the pairs.

    Its second topk returns the position of a pair among the sorted halves, so recorded expert x * N + y becomes
    (rank of x) * N + (rank of y). The ids in `chosen` are expert ids, as in every Selection.
    """

    def __init__(self, router: FoundRouter, ids_TK: Tensor | None, live_T1: Tensor | None, compare: bool) -> None:
        super().__init__(router, ids_TK, live_T1, compare)
        self.keys: int = router.module.num_keys
        self.halves: Tensor | None = None  # [2, T, N]: the key at each rank

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation `func` of the router, with the pairs of the recorded experts."""
        if func not in TOP_K:
            return func(*args, **kwargs)
        if args[0].shape[-1] == self.keys and self.halves is None:
            sorted_halves = func(*args, **kwargs)
            self.halves = sorted_halves[1]
            return sorted_halves
        if args[0].shape[-1] == self.keys**2 and self.halves is not None:
            return self._answer_pairs(func, args, kwargs)
        return func(*args, **kwargs)

    def _answer_pairs(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self.halves is not None
        pairs = args[0]
        self.offer(pairs)
        if self.ids_TK is None:
            live = func(*args, **kwargs)
            chosen = self._experts(live[1])
            self._note(chosen, chosen, live[1])
            return live
        positions_now = self.live_indices(func, args, kwargs)
        live_ids = None if positions_now is None else self._experts(positions_now)
        ids = self.mix(self.ids_TK, live_ids, pairs)
        ranks = self.halves.argsort(-1)
        positions = ranks[0].gather(-1, ids // self.keys) * self.keys + ranks[1].gather(-1, ids % self.keys)
        self._note(ids, live_ids, positions)
        return torch.return_types.topk((pairs.gather(-1, positions), positions))

    def _experts(self, positions: Tensor) -> Tensor:
        assert self.halves is not None
        x = self.halves[0].gather(-1, positions // self.keys)
        return x * self.keys + self.halves[1].gather(-1, positions % self.keys)


ALL_SELECTIONS: dict[Choice, type[Selection]] = {
    **SELECTIONS,
    Choice.SPARSE_MIXER: SparseMixerSelection,
    Choice.PRODUCT_KEYS: ProductKeySelection,
}
