"""RouterReplay: make a transformers model use the experts that somebody else chose, and note what it chose.

    replayer = RouterReplay(model)
    with replayer.replay(batch.routes):
        loss = loss_of(model(input_ids=batch.token_ids[None]))
        loss.backward()
    replayer.stats.rows_replayed

Shapes: T tokens, L routed layers, K top-k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from router_replay.errors import ReplayError
from router_replay.families.from_modules import device_of, find_routers
from router_replay.replay import checkpoint
from router_replay.replay.passes import Watch
from router_replay.replay.replayable import (
    Recorded,
    Replayable,
    Rows,
    count_rows,
    on_device,
    refuse_missing,
    rows_and_masks,
)
from router_replay.replay.site import Site
from router_replay.replay.state import Plan, Recording, State
from router_replay.replay.stats import Counters, Stats
from router_replay.replay.wrapper import Wrapper
from router_replay.spec import RouterSpec


class RouterReplay:
    """Replay and record in the routers of this model's text decoder, and in no other module.

    `spec` is read off the routers that were found; one that is passed must be the same. With `agreement`,
    the live choice is computed beside the replayed one and their agreement counted: it costs one topk a layer.
    """

    def __init__(self, model: nn.Module, spec: RouterSpec | None = None, *, agreement: bool = False) -> None:
        self._found = find_routers(model)
        self._spec = self._found.spec
        if spec is not None and spec != self._spec:
            raise ReplayError(f"the model's routers are {self._spec}, the spec that was given is {spec}")
        self._model = model
        self._agreement = agreement
        self._state = State()
        self._counters = Counters(self._spec.layers)
        sites = [Site(router, column, self._state) for column, router in enumerate(self._found.routers)]
        watch = Watch(self._found.stack_name or "the model", self._found.stack, self._state, sites)
        self._wrappers: list[Wrapper] = [*sites, watch]
        for wrapper in self._wrappers:
            wrapper.refuse_second()
        for wrapper in self._wrappers:
            wrapper.install()
        checkpoint.remember(model, self._state)

    @property
    def spec(self) -> RouterSpec:
        return self._spec

    @property
    def router_names(self) -> frozenset[str]:
        """The modules that choose experts, by their names in the model."""
        return frozenset(router.name for router in self._found.routers)

    @property
    def stats(self) -> Stats:
        """Rows replayed and live so far. Waits for the device once."""
        return self._counters.read()

    @contextlib.contextmanager
    def replay(
        self,
        routes: Replayable,
        *,
        on_missing: Literal["raise", "live"] = "raise",
        loss_mask: Any = None,
        idle: Any = None,
        agreement: bool | None = None,
        start: int = 0,
    ) -> Iterator[RouterReplay]:
        """Every forward pass in this block uses these routes, and so does its recompute in backward.

        `routes` are Routes, TensorRoutes, a batch that holds them, or what `record` gave; one row per token
        of the pass. Missing rows are routed live and counted, but for those where `idle` [T] is True: padding, and
        tokens that predict nothing. Where `loss_mask` [T] is True a missing row raises, unless `on_missing="live"`. A
        batch brings its own `loss_mask` and `idle`.
        `start` is the number of tokens in the key-value cache before the first row, for a sequence in chunks.
        """
        if on_missing not in ("raise", "live"):
            raise ReplayError(f'on_missing must be "raise" or "live", got {on_missing!r}')
        rows, loss_mask, idle = rows_and_masks(routes, loss_mask, idle)
        self._refuse_unfit(rows, loss_mask if on_missing == "raise" else None)
        wanted = self._agreement if agreement is None else agreement
        # FSDP1 keeps parameters flat, above the decoder. Then the pass says where it runs, and the plan moves.
        tensors = on_device(routes, rows, device_of(self._found.stack) or "cpu")
        plan = Plan.of(rows, tensors, count_rows(rows, idle), agreement=wanted, start=start)
        checkpoint.remember(self._model, self._state)
        with self._state.block(plan), self._counters.counting(plan):
            yield self

    @contextlib.contextmanager
    def record(self) -> Iterator[Recorded]:
        """Note the experts that each forward pass in this block uses, live or replayed; all of a pass, or nothing."""
        recording = Recording(self._spec)
        checkpoint.remember(self._model, self._state)
        with self._state.block(recording):
            yield Recorded(recording)

    def checkpoint_context(self) -> checkpoint.Contexts:
        """A `context_fn` for torch.utils.checkpoint: the recompute uses the routes of its own forward.

        Only a checkpoint around a layer that is compiled by itself needs it.
        """
        return checkpoint.contexts(self._state)

    def detach(self) -> None:
        """Leave the model as it was before this object was made, which then refuses further blocks."""
        self._state.refuse_detached()
        for wrapper in self._wrappers:
            wrapper.refuse_covered()
        self._state.detach()
        for wrapper in self._wrappers:
            wrapper.uninstall()
        checkpoint.forget(self._model, self._state)

    def __repr__(self) -> str:
        found = self._found
        first, last = found.routers[0].name, found.routers[-1].name
        where = f"{first} ... {last}" if len(found.routers) > 1 else first
        text = (
            f"RouterReplay({type(self._model).__name__}: {len(found.routers)} routers, {self._spec.top_k} of "
            f"{self._spec.num_experts} experts, {where}"
        )
        if found.left_live:
            reasons = sorted({reason for _, reason in found.left_live})
            text += f"; {len(found.left_live)} left live ({'; '.join(reasons)})"
        return text + ")"

    # -- inside -----------------------------------------------------------------------------------

    def _refuse_unfit(self, rows: Rows, needed: Any) -> None:
        if rows.spec != self._spec:
            raise ReplayError(
                f"these routes are of another model: {rows.spec}; the model's routers are {self._spec}"
                " (a pipeline stage takes its share by select_layers)"
            )
        if needed is not None:
            refuse_missing(rows, needed)
        if not rows.any_captured:
            raise ReplayError(f"none of the {len(rows)} rows is captured: this would be a live pass")
