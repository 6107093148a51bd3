"""Watch each forward pass of the decoder: right number of tokens before it, every router used after it.

A fused kernel that never calls the router, or a router that chooses in another way than it did when this was
written, would make replay do nothing. So each pass under replay or record ends with a look at every router.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor, nn

from router_replay.errors import ReplayError
from router_replay.replay.state import Plan, Recording, Site, State, in_backward

TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds")


class Watch:
    """The two hooks on the decoder stack. A deepcopy of the model gets one that watches nothing."""

    def __init__(self, state: State | None, sites: list[Site], layers: tuple[int, ...]) -> None:
        self.state = state
        self.sites = sites
        self.layers = layers
        self.rows: int | None = None  # tokens of the pass that runs now, where they can be counted

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch(None, [], ())

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        state = self.state
        if state is None or (state.plan is None and state.recording is None):
            return
        if not torch.compiler.is_compiling():
            if in_backward():
                return
            if state.owner != threading.get_ident():
                raise ReplayError(
                    "this model runs in a thread while another thread has a replay or record block open on it: "
                    "routes of one batch must not reach another"
                )
        self.rows = None
        tokens = _tokens(args, kwargs)
        if tokens is not None:
            self.rows = math.prod(tokens.shape[:2])
            if state.plan is not None:
                self._check(state.plan, self.rows, tokens.device)
        for site in self.sites:
            site.used = False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        state = self.state
        if state is None or (state.plan is None and state.recording is None):
            return
        compiling = torch.compiler.is_compiling()
        if not compiling and in_backward():
            return
        unused = [self.layers[site.column] for site in self.sites if not site.used]
        if unused:
            raise ReplayError(
                f"the routers of layers {unused} did not choose experts in this pass, so their routes were not "
                "used: a fused kernel or a patch runs in place of the router. Switch it off (for hub kernels: load the "
                "model without use_kernels), or report the model's class"
            )
        if state.recording is not None and not compiling:
            self._check_recording(state.recording)
        if state.plan is None:
            return
        if not compiling:
            state.plan.passes += 1
        elif state.plan.compiled_passes is not None:
            state.plan.compiled_passes.add_(1)

    def _check(self, plan: Plan, rows: int, device: torch.device) -> None:
        if rows != len(plan):
            raise ReplayError(
                f"the routes have {len(plan)} rows, this forward pass has {rows} tokens: rows and tokens are laid out "
                "by the same code (pack, shard), padding included"
            )
        if device != plan.ids_TLK.device:
            if not plan.from_host:
                raise ReplayError(f"the routes are on {plan.ids_TLK.device}, this forward pass runs on {device}")
            plan.move(device)

    def _check_recording(self, recording: Recording) -> None:
        """A family that routes some tokens elsewhere (ernie4_5_vl_moe: images) would leave rows that fit no token."""
        for column, layer in enumerate(self.layers):
            got = len(recording.pieces[column][-1])
            if self.rows is not None and got != self.rows:
                raise ReplayError(f"layer {layer}: the router was given {got} of the {self.rows} tokens of this pass")


def _tokens(args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that says how many tokens this pass has, [batch, sequence, ...]; None: each router still counts."""
    for name in TOKENS:
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name]
    return args[0] if args and isinstance(args[0], Tensor) and args[0].ndim == 2 else None
