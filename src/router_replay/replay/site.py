"""Site wraps one router and applies the active routes to each of its calls.

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.families import Choice
from router_replay.families.from_modules import FoundRouter
from router_replay.replay.own_code import calls_topk, with_topk
from router_replay.replay.router_scores import RouterScores
from router_replay.replay.selection import Selection
from router_replay.replay.special import ALL_SELECTIONS
from router_replay.replay.state import Column, Plan, State
from router_replay.replay.wrapper import Wrapper, call


class Site(Wrapper):
    """Wraps the router whose routes are column `column` of the plan and of the recordings."""

    def __init__(self, router: FoundRouter, column: int, state: State) -> None:
        super().__init__(router.name, router.module, router.method)
        self.router = router
        self.column = Column(column)
        self.state = state
        self.used = False  # True once the choice was replayed or recorded in the current pass
        self.chosen_TK: Tensor | None = None  # the choice of the current pass, if one records or measures it
        self.figures_2T: Tensor | None = None  # mass and entropy of the current pass, if one measures
        self.chooser: Any = None  # the router's method, once a call has shown that its own code calls `torch.topk`

    def installed(self) -> Callable[..., Any]:
        """Return a bound method, so that all layers share one compiled graph."""
        return types.MethodType(call, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the router with the active routes; without routes, recordings and measures it runs unchanged."""
        plan, first_time = self.state.decide()
        if first_time and (plan is not None or self.state.recordings or self.state.measuring):
            return self._first_time(plan, args, kwargs)
        return self.original(*args, **kwargs) if plan is None else self._again(plan, args, kwargs)

    def _first_time(self, plan: Plan | None, args: Any, kwargs: Any) -> Any:
        """Run a call of a forward pass: record its choice, and compare it with the live choice if requested."""
        self._refuse_second_call()
        compare = plan is not None and plan.agree_L is not None
        apart = compare and self.router.choice is Choice.GROUPED
        live_TK = self._live_choice(args, kwargs) if apart else None
        scores = RouterScores(self.router.num_experts) if self.state.measuring else None
        out, selection = self._run(plan, compare and not apart, args, kwargs, scores)
        if selection.chosen is not None:  # if None, `used` stays False and Watch raises an error with the layer
            self.used = True
            if scores is not None:
                self.figures_2T = scores.figures()
            recordings, passing = self.state.recordings, self.state.passing
            if (recordings or scores is not None) and not (passing and plan is not None and plan.holds_choice):
                chosen_TK = selection.chosen.detach()
                self.chosen_TK = chosen_TK.to(recordings[0].dtype) if recordings else chosen_TK
                if not passing:  # a router that is called alone; Watch records and counts the passes of the decoder
                    self.record()
            if plan is not None and selection.ids_TK is not None:
                plan.compare(self.column, live_TK if apart else selection.live_choice)
                if not passing:
                    plan.count_agreement(self.column)
        return out

    def record(self) -> None:
        """Give the choice to the recordings. It is no part of a compiled layer, as lists would be constants of it."""
        chosen_TK, self.chosen_TK = self.chosen_TK, None
        if chosen_TK is not None:
            for recording in self.state.recordings:
                recording.add(self.column.number, chosen_TK)

    def _again(self, plan: Plan, args: Any, kwargs: Any) -> Any:
        """Run a recompute in backward with the same routes; it is neither recorded nor counted."""
        out, selection = self._run(plan, False, args, kwargs)
        if selection.chosen is None:
            raise ReplayError(
                f"the router of layer {self.router.layer} did not choose experts in the recompute of backward, so its "
                "routes were not used: the recompute must run the same code as the forward pass"
            )
        return out

    def _run(
        self, plan: Plan | None, compare: bool, args: Any, kwargs: Any, scores: RouterScores | None = None
    ) -> tuple[Any, Selection]:
        """Call the router with its column of the plan; without a plan the router chooses and its choice is recorded.

        `scores` is shown what the router computes. Returns the router's output and the Selection, which holds the
        chosen ids.
        """
        ids_TK = None if plan is None else plan.column(self.column)
        live_T1 = None if plan is None else plan.live_T1
        selection = ALL_SELECTIONS[self.router.choice](self.router, ids_TK, live_T1, compare)
        selection.scores = scores
        eager = not torch.compiler.is_compiling()
        if eager and self.chooser is not None and scores is None and self.chooser is self.of_class():
            return with_topk(self.chooser, selection.topk)(self.module, *args, **kwargs), selection
        with selection:
            out = self.original(*args, **kwargs)
        if eager and self.chooser is None:
            self._learn_chooser(selection)
        return out, selection

    def _learn_chooser(self, selection: Selection) -> None:
        """Note whether the router chose by `torch.topk` in its own code, and by nothing else.

        Only a single choice among all experts counts: those of the other rules depend on each other.
        """
        if self.router.choice is Choice.TOP_K and self.previous is None and len(selection.choosers) == 1:
            function = self.of_class()
            self.chooser = function if calls_topk(function, selection.choosers[0]) else None

    def _live_choice(self, args: Any, kwargs: Any) -> Tensor | None:
        """Return the live choice of a second call of the router.

        This is safe for grouped routers: they draw no random numbers and change nothing in place.
        """
        with torch.no_grad():
            _, selection = self._run(None, False, args, kwargs)
        return selection.chosen

    def _refuse_second_call(self) -> None:
        if self.used and self.state.passing:
            raise ReplayError(
                f"the router of layer {self.router.layer} was called twice in one forward pass, but there is one row "
                "per token: replay and record support only models that run each layer once"
            )
