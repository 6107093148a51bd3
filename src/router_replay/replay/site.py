"""Site: the wrapper on one router, which puts the routes in force into each of its calls.

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.families import Choice
from router_replay.families.from_modules import FoundRouter
from router_replay.replay.selection import Selection
from router_replay.replay.special import ALL_SELECTIONS
from router_replay.replay.state import Plan, State
from router_replay.replay.wrapper import Wrapper


class Site(Wrapper):
    """The router of column `column` of the routes."""

    def __init__(self, router: FoundRouter, column: int, state: State) -> None:
        super().__init__(router.name, router.module, router.method)
        self.router = router
        self.column = column
        self.state = state
        self.used = False  # the choice was answered (or noted) in the pass that runs now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, first_time = self.state.decide()
        recordings = self.state.recordings if first_time else ()  # a recompute is neither recorded nor counted
        if plan is None and not recordings:
            return self.original(*args, **kwargs)
        if first_time:
            self._refuse_second_call()
        compare = first_time and plan is not None and plan.agree_L is not None
        live_TK = self._live_choice(args, kwargs) if compare and self.router.choice is Choice.GROUPED else None
        selection = self._selection(plan, compare and live_TK is None)
        with selection:
            out = self.original(*args, **kwargs)
        if selection.chosen is None:
            if not first_time:
                raise ReplayError(f"layer {self.router.layer} chose no experts in a recompute: routes were not used")
            return out  # the pass ends with an error that names the layer, since `used` is still False
        if first_time:
            self.used = True
            for recording in recordings:
                recording.add(self.column, selection.chosen)
        if compare:
            self._count_agreement(plan, selection.live_choice if live_TK is None else live_TK)
        return out

    def _selection(self, plan: Plan | None, compare: bool) -> Selection:
        ids_TK = None if plan is None else plan.column(self.column)
        live_T1 = None if plan is None else plan.live_T1
        return ALL_SELECTIONS[self.router.choice](self.router, ids_TK, live_T1, compare)

    def _refuse_second_call(self) -> None:
        if self.used and self.state.passing:
            raise ReplayError(
                f"the router of layer {self.router.layer} was called twice in one forward pass, and there is one row "
                "per token: replay and record support models that run each layer once"
            )

    def _live_choice(self, args: Any, kwargs: Any) -> Tensor | None:
        """Call the router once more, live: grouped routers draw no numbers and change nothing in place."""
        selection = self._selection(None, False)
        with torch.no_grad(), selection:
            self.original(*args, **kwargs)
        return selection.chosen

    def _count_agreement(self, plan: Any, live_TK: Any) -> None:
        """Add to the layer's count on the device; nothing is read back until somebody asks for the stats."""
        same_T = (plan.column(self.column).unsqueeze(-1) == live_TK.unsqueeze(-2)).any(-1).all(-1)
        if plan.live_T1 is not None:
            same_T = same_T & ~plan.live_T1.reshape(-1)
        plan.agree_L[self.column] += same_T.sum()
