"""Override a router's choice of experts without changing the rest of its arithmetic.

While a router runs inside one of these modes, the operation that chooses (`topk`, `argmax`, `max`) returns
the recorded ids and the live scores at those ids. Everything the family does with the chosen scores
afterwards (normalise, scale, cast, add a bias) happens as in a live pass, with gradients to the router.

A mode is used for one call of one router. If the router is known to choose by `torch.topk` in its own code, `own_code`
puts `Selection.topk` there, and the mode stays off. `chosen` holds the ids that the router received: the recorded ids,
the live choice if there were none, or a mix by row.

Shapes: T tokens, K top-k, E experts, G groups. Leading dimensions of scores may be [T] or [batch, sequence].
"""

from __future__ import annotations

import math
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from router_replay.errors import ReplayError
from router_replay.families import Choice
from router_replay.families.from_modules import FoundRouter
from router_replay.replay.router_scores import ACTIVATIONS, RouterScores

TOP_K = (torch.topk, Tensor.topk)
ARGMAX = (torch.argmax, Tensor.argmax)
MAX = (torch.max, Tensor.max)


class Selection(TorchFunctionMode):
    """Handles one call of a router that chooses with a single topk over all experts.

    `ids_TK` are the recorded ids (int64), or None to let the router choose. `live_T1` is True for rows without
    recorded ids; None means that every row has them. With `compare`, the live choice is also computed and kept in
    `live_choice`. `scores`, if it is set, is shown what the router computes. `choosers` has an entry for each operation
    that chose while the mode was on: the code that called `torch.topk`, or None for another operation.
    """

    def __init__(self, router: FoundRouter, ids_TK: Tensor | None, live_T1: Tensor | None, compare: bool) -> None:
        super().__init__()
        self.router = router
        self.ids_TK = ids_TK
        self.live_T1 = live_T1
        self.needs_live = ids_TK is None or live_T1 is not None or compare
        self.chosen: Tensor | None = None
        self.live_choice: Tensor | None = None
        self.scores: RouterScores | None = None
        self.choosers: list[CodeType | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.chosen
        out = self.answer(func, args, kwargs or {})
        if not torch.compiler.is_compiling() and self.chosen is not before:
            self.choosers.append(sys._getframe(1).f_code if func is torch.topk else None)
        if self.scores is not None and func in ACTIVATIONS:
            self.scores.see(func, out)
        return out

    def topk(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `torch.topk` in a router's own code, without the mode."""
        return self.answer(torch.topk, args, kwargs)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation `func` of the router; of its choice, with the recorded ids."""
        if func in TOP_K and self._is_choice(args, kwargs):
            return self._answer(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_choice(self, args: Any, kwargs: Any) -> bool:
        return is_choice(args, kwargs, self.router.num_experts, self.router.top_k)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0]
        self.offer(scores)
        if self.ids_TK is None:
            live = func(*args, **kwargs)
            self._note(live[1], live[1])
            return live
        live_ids = self.live_indices(func, args, kwargs)
        ids = self.mix(self.ids_TK, live_ids, scores)
        self._note(ids, live_ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def live_indices(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the ids that the router would choose, or None if they are not needed.

        They are computed without a graph: a recompute does not compare, and must save the same tensors.
        """
        if not self.needs_live:
            return None
        with torch.no_grad():
            live = func(*args, **kwargs)
        return live if isinstance(live, Tensor) else live[1]

    def mix(self, ids_TK: Tensor, live: Tensor | None, scores: Tensor) -> Tensor:
        """Return the recorded ids in the layout of `scores`, with the live choice in rows that have none.

        Raises ReplayError if the number of rows differs from the number of tokens.
        """
        leading = scores.shape[:-1]
        rows = leading[0] if len(leading) == 1 else math.prod(leading)
        if rows != ids_TK.shape[0]:
            raise ReplayError(
                f"layer {self.router.layer}: the router got {rows} tokens, the routes have {ids_TK.shape[0]} rows: "
                "expected one row per token"
            )
        ids, live_T1 = ids_TK, self.live_T1
        if len(leading) > 1:
            ids = ids.reshape(*leading, ids.shape[-1])
            live_T1 = None if live_T1 is None else live_T1.reshape(*leading, 1)
        return ids if live_T1 is None or live is None else torch.where(live_T1, live, ids)

    def offer(self, scores: Tensor) -> None:
        """Show `scores`, the tensor [..., E] that the router chooses from, to those who measure."""
        if self.scores is not None:
            self.scores.offer(scores)

    def _note(self, chosen: Tensor, live: Tensor | None, places: Tensor | None = None) -> None:
        """Keep the `chosen` ids and the `live` choice; `places` are those of the chosen scores, if not the ids."""
        self.chosen = _rows(chosen, self.router.top_k)
        self.live_choice = None if live is None else _rows(live, self.router.top_k)
        if self.scores is not None:
            self.scores.choose(chosen if places is None else places)


class GroupedSelection(Selection):
    """Handles a router that first chooses groups of experts.

    The groups of the recorded experts must be chosen, otherwise the scores of these experts are masked. Once the
    recorded groups are chosen, the same call cannot give a live choice among all experts.
    """

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation `func` of the router, with the groups of the recorded experts."""
        if func in TOP_K and args[0].ndim == 2:  # the topk for the best two of each group has three dimensions
            if self._is_choice(args, kwargs):
                return self._answer(func, args, kwargs)
            if self.ids_TK is not None and args[0].shape[-1] == self.router.num_groups:
                return self._answer_groups(self.ids_TK, func, args, kwargs)
        return func(*args, **kwargs)

    def _answer_groups(self, ids_TK: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        scores_TG = args[0]
        groups_TK = ids_TK // (self.router.num_experts // self.router.num_groups)
        live_groups = self.live_indices(func, args, kwargs)
        if live_groups is not None and self.live_T1 is not None:
            width = max(groups_TK.shape[1], live_groups.shape[1])  # the groups only index a mask, so any width works
            groups_TK = torch.where(self.live_T1, _widen(live_groups, width), _widen(groups_TK, width))
        return torch.return_types.topk((scores_TG.gather(-1, groups_TK), groups_TK))


class ArgmaxSelection(Selection):
    """Handles a router that calls argmax once per slot, in slot order.

    switch_transformers then reads the same scores with max.
    """

    def __init__(self, router: FoundRouter, ids_TK: Tensor | None, live_T1: Tensor | None, compare: bool) -> None:
        super().__init__(router, ids_TK, live_T1, compare)
        self.slots: list[Tensor] = []
        self.live_slots: list[Tensor] = []

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation `func` of the router, with the recorded id of a slot."""
        wide = (
            bool(args) and isinstance(args[0], Tensor) and args[0].ndim and args[0].shape[-1] == self.router.num_experts
        )
        if func in ARGMAX and wide and len(self.slots) < self.router.top_k:
            return self._answer_slot(args[0], self.live_indices(func, args, kwargs))
        if func in MAX and wide and self.router.top_k == 1 and self.chosen is not None:
            ids = self.slots[0].unsqueeze(-1)
            return torch.return_types.max((args[0].gather(-1, ids).squeeze(-1), ids.squeeze(-1)))
        return func(*args, **kwargs)

    def _answer_slot(self, scores: Tensor, live: Tensor | None) -> Tensor:
        slot = len(self.slots)
        self.offer(scores)
        if self.ids_TK is None:
            assert live is not None
            ids = live
        else:
            recorded_T1 = self.ids_TK[:, slot : slot + 1]
            ids = self.mix(recorded_T1, None if live is None else live.unsqueeze(-1), scores).squeeze(-1)
        self.slots.append(ids)
        if live is not None:
            self.live_slots.append(live)
        if len(self.slots) == self.router.top_k:
            live_choice = torch.stack(self.live_slots, -1) if live is not None else None
            self._note(torch.stack(self.slots, -1), live_choice)
        return ids


SELECTIONS: dict[Choice, type[Selection]] = {
    Choice.TOP_K: Selection,
    Choice.GROUPED: GroupedSelection,
    Choice.ARGMAX: ArgmaxSelection,
}


def is_choice(args: Any, kwargs: Any, num_experts: int, top_k: int) -> bool:
    """Return whether a topk with `args` and `kwargs` chooses `top_k` of all `num_experts` experts."""
    scores, k, dim = _topk_arguments(args, kwargs)
    return dim in (-1, scores.ndim - 1) and k == top_k and scores.shape[-1] == num_experts


def _topk_arguments(args: Any, kwargs: Any) -> tuple[Tensor, int, int]:
    k = kwargs["k"] if "k" in kwargs else args[1]
    dim = kwargs["dim"] if "dim" in kwargs else (args[2] if len(args) > 2 else -1)
    return args[0], k, dim


def _rows(ids: Tensor, top_k: int) -> Tensor:
    """Return ids [..., K] as [T, K]; most routers give them so, and a reshape costs as much as a small kernel."""
    return ids if ids.ndim == 2 else ids.reshape(-1, top_k)


def _widen(groups: Tensor, width: int) -> Tensor:
    """Pad to `width` columns by repeating the first: setting a mask entry twice has no effect."""
    missing = width - groups.shape[1]
    return torch.cat([groups, groups[:, :1].expand(-1, missing)], dim=1) if missing else groups
