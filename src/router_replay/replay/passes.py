"""Watch checks the number of tokens before each forward pass of the decoder, and the use of every router after it.

Replay would have no effect if a fused kernel never called the router, or if a router chose by an operation that
this package does not know. So each pass under replay or record ends with a check of every router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from router_replay.errors import ReplayError
from router_replay.families import by_class
from router_replay.replay.site import Site
from router_replay.replay.state import Plan, Recording, State
from router_replay.replay.wrapper import Wrapper

TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds")


class Watch(Wrapper):
    """Wraps the decoder stack; one call is one forward pass."""

    def __init__(self, name: str, stack: nn.Module, state: State, sites: Sequence[Site]) -> None:
        super().__init__(name, stack)
        self.state = state
        self.sites = sites
        self.cache_of_the_encoder = by_class(type(stack)).cache_of_the_encoder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass with the checks before and after it; a recompute runs without them.

        If the pass fails, its recorded rows are dropped.
        """
        state = self.state
        if state.is_recompute():
            return self.original(*args, **kwargs)
        recordings, follows = state.recordings, state.follows
        lengths = [[len(column) for column in recording.pieces] for recording in recordings]
        rows = self._before(args, kwargs) if state.blocks else None
        outer, state.passing = state.passing, True
        try:
            out = self.original(*args, **kwargs)
            if state.plan is not None or recordings or state.measuring:
                self._after(rows)
            if follows is not None:
                follows.passed()
        except BaseException:
            for recording, before in zip(recordings, lengths, strict=True):
                recording.drop_after(before)
            raise
        finally:
            state.passing = outer
            if follows is not None:
                state.plan = None
        return out

    def _before(self, args: Any, kwargs: Any) -> int | None:
        """Return the number of tokens of the pass, None if unknown; raise ReplayError if the routes do not fit it."""
        state = self.state
        if torch.compiler.is_compiling():
            if not state.opened_here():
                raise ReplayError(
                    "another thread has a replay or record block open on this model: close that block first, or give "
                    "each thread its own model"
                )
        else:
            state.refuse_elsewhere("run a forward pass")
        for site in self.sites:
            site.used = False
            site.chosen_TK = site.figures_2T = None
        if state.follows is not None:
            state.plan = state.follows.plan_for(self.module, args, kwargs)
        tokens = _tokens(args, kwargs)
        rows = None if tokens is None else math.prod(tokens.shape[:2])
        if state.plan is not None:
            if not self.cache_of_the_encoder:
                _check_cache(state.plan, kwargs.get("past_key_values"))
            if tokens is not None and rows is not None:
                _check_rows(state.plan, rows, tokens.device)
                for site in self.sites:
                    site.column.move(tokens.device)
        return rows

    def _after(self, rows: int | None) -> None:
        state = self.state
        unused = [site.router.layer for site in self.sites if not site.used]
        if unused:
            raise ReplayError(
                f"the routers of layers {unused} did not choose experts in this pass, so their routes were not "
                "used: a fused kernel or a patch runs in place of the router. Switch it off (for hub kernels: load the "
                "model without use_kernels), or report the model's class"
            )
        if state.plan is not None and state.plan.holds_choice and (state.recordings or state.measuring):
            for site, chosen_TK in zip(self.sites, state.plan.choice_TLK().unbind(1), strict=True):
                site.chosen_TK = chosen_TK
        self._measure()
        for site in self.sites:
            site.record()
        compiling = torch.compiler.is_compiling()
        if not compiling and rows is not None:
            for recording in state.recordings:
                self._check_recording(recording, rows)
        if state.plan is None:
            return
        state.plan.count_agreement()
        if not compiling:
            state.plan.passes += 1
        elif state.plan.compiled_passes is not None:
            state.plan.was_compiled = True
            state.plan.compiled_passes.add_(1)

    def _measure(self) -> None:
        """Give the figures and the choices of the pass to those who measure it."""
        chosen = [site.chosen_TK for site in self.sites if site.chosen_TK is not None]
        figures = [site.figures_2T for site in self.sites if site.figures_2T is not None]
        for one in self.state.measuring:
            one.gauge.add(figures, chosen, one.counted_T)
        for site in self.sites:
            site.figures_2T = None

    def _check_recording(self, recording: Recording, rows: int) -> None:
        """Raise ReplayError if a router did not get all tokens of the pass.

        A family that routes some tokens elsewhere (ernie4_5_vl_moe: images) would record rows that match no token.
        """
        for site in self.sites:
            got = len(recording.pieces[site.column.number][-1])
            if got != rows:
                raise ReplayError(
                    f"layer {site.router.layer}: expected the router to get all {rows} tokens of this pass, got {got}; "
                    "a recording needs a row for every token"
                )


def _check_rows(plan: Plan, rows: int, device: torch.device) -> None:
    if rows != len(plan):
        raise ReplayError(
            f"the routes have {len(plan)} rows, this forward pass has {rows} tokens: expected one row per token, "
            "padding included. Use the tokens and the routes of the same batch (pack, shard)"
        )
    if device != plan.ids_TLK.device:
        if not plan.from_host:
            raise ReplayError(
                f"the routes are on {plan.ids_TLK.device}, this forward pass runs on {device}: move the routes there"
            )
        plan.move(device)


def _check_cache(plan: Plan, cache: Any) -> None:
    """Raise ReplayError unless the first row belongs to the first token after the cache."""
    if cache is None:
        return
    if not hasattr(cache, "get_seq_length"):
        raise ReplayError(
            f"past_key_values must have get_seq_length(), got a {type(cache).__name__}: replay without a cache "
            "(use_cache=False)"
        )
    held = cache.get_seq_length()
    held = held if isinstance(held, int) else int(held)
    if held != plan.start:
        raise ReplayError(
            f"the first row of these routes belongs to token {plan.start}, and the key-value cache already holds "
            f"{held} tokens: replay the whole sequence in one pass without a cache, or open a block for each chunk "
            f"(replayer.replay(routes[{held}:...], start={held}))"
        )


def _tokens(args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor that gives the number of tokens of this pass, [batch, sequence, ...].

    None means it was not found; each router still checks the number of its rows.
    """
    for name in TOKENS:
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name]
    return args[0] if args and isinstance(args[0], Tensor) and args[0].ndim == 2 else None
