"""RouterReplay makes a transformers model use given expert choices, and records the choices it makes.

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
from router_replay.families.from_modules import FoundRouter, device_of, find_routers
from router_replay.replay import checkpoint
from router_replay.replay.follow import Following, Settings
from router_replay.replay.gauge import Measuring, RouterGauge
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
from router_replay.store import RouteStore


class RouterReplay:
    """Replays and records routes in the routers of a model's text decoder; all other modules stay unchanged.

    `model` is a transformers model or a module that holds one. The RouterSpec is derived from its routers; a `spec`
    that is passed must equal it, otherwise ReplayError is raised. With `agreement`, each replayed pass also computes
    the live choice and counts how often both agree, which costs one topk per layer. ReplayError is also raised if
    the model has no known router or already belongs to another RouterReplay.
    """

    def __init__(self, model: nn.Module, spec: RouterSpec | None = None, *, agreement: bool = False) -> None:
        self._found = find_routers(model)
        self._spec = self._found.spec
        if spec is not None and spec != self._spec:
            raise ReplayError(f"spec must equal that of the model's routers: expected {self._spec}, got {spec}")
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
        """The RouterSpec of the model's routers."""
        return self._spec

    @property
    def routers(self) -> tuple[FoundRouter, ...]:
        """The routers, in the order in which a forward pass calls them."""
        return self._found.routers

    @property
    def router_names(self) -> frozenset[str]:
        """The names, within the model, of the modules that choose experts."""
        return frozenset(router.name for router in self._found.routers)

    @property
    def stats(self) -> Stats:
        """The counts of replayed and live rows so far. Reading them synchronizes with the device once."""
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
        """Apply `routes` to every forward pass in this block, and to the recompute of that pass in backward.

        `routes` are Routes, TensorRoutes, a batch that holds them, or the result of `record`, with one row per token
        of the pass. Missing rows are routed live.

        `on_missing="raise"` raises ReplayError if a row is missing where `loss_mask` [T] is True; "live" allows it.
        `idle` [T] is True for padding and for tokens that predict nothing; these are left out of the count of live
        rows. If `routes` is a batch, `loss_mask` and `idle` default to those of the batch. `agreement` overrides the
        setting of the constructor. `start` is the number of tokens in the key-value cache before the first row, for
        a sequence that is run in chunks.

        Yields this RouterReplay. Raises ReplayError if the routes do not fit the model or no row is captured.
        """
        if on_missing not in ("raise", "live"):
            raise ReplayError(f'on_missing must be "raise" or "live", got {on_missing!r}')
        rows, loss_mask, idle = rows_and_masks(routes, loss_mask, idle)
        self._refuse_unfit(rows, loss_mask if on_missing == "raise" else None)
        wanted = self._agreement if agreement is None else agreement
        # FSDP1 keeps flat parameters above the decoder, so the device is unknown here; the pass then moves the plan.
        tensors = on_device(routes, rows, device_of(self._found.stack) or "cpu")
        plan = Plan.of(rows, tensors, count_rows(rows, idle), agreement=wanted, start=start)
        self._remember_checkpoints()
        with self._state.block(plan), self._counters.counting(plan):
            yield self

    def follow(
        self,
        store: RouteStore,
        *,
        on_missing: Literal["raise", "live"] = "raise",
        evaluation: bool = False,
        reference: bool = False,
        pad_token_id: int | None = None,
        agreement: bool | None = None,
    ) -> Following:
        """Return a block in which every forward pass replays the rows that `store` has for its own tokens.

        The rows are found by the `input_ids`, `attention_mask`, `position_ids` and sequence borders that the decoder
        gets, so that the caller may shuffle, split, pad and pack as it likes. A pass may hold a stored sequence, or its
        beginning. A recompute in backward uses the rows of its own forward. Use the result in a `with` statement, or
        call its `start` and `stop`. A `replay` or another `follow` block inside it takes its place.

        `on_missing="raise"` raises ReplayError, which says where a sequence departs from the nearest stored one, unless
        all rows that bear loss are there; "live" routes and counts them. Three kinds of pass stay live: those of a
        model in evaluation mode, unless `evaluation` is True; those with other adapters (PEFT) than at the start, or
        with disabled ones, unless `reference` is True; and those of `generate`. A pass that scores old log-probs in
        training mode is followed, with and without a gradient. `pad_token_id` is cut from the end of a sequence that is
        not stored with it, if the pass has no mask of its padding. `agreement` overrides that of the constructor.

        Raises ReplayError if the store is of another model.
        """
        if not isinstance(store, RouteStore):
            raise ReplayError(f"follow() needs a RouteStore, got {type(store).__name__}; for one batch, use replay()")
        if store.spec != self._spec:
            raise ReplayError(f"the store is of another model: expected {self._spec}, got {store.spec}")
        wanted = self._agreement if agreement is None else agreement
        settings = Settings(on_missing, evaluation, reference, pad_token_id, wanted)
        return Following(store, self._model, self._found.stack, self._state, self._counters, settings)

    @contextlib.contextmanager
    def record(self) -> Iterator[Recorded]:
        """Record the experts that each forward pass in this block uses, live or replayed.

        Yields a Recorded, which holds complete passes only: a pass that fails is dropped.
        """
        recording = Recording(self._spec)
        self._remember_checkpoints()
        with self._state.block(recording):
            yield Recorded(recording)

    @contextlib.contextmanager
    def measure(self, gauge: RouterGauge, counted: Any = None) -> Iterator[None]:
        """Add to `gauge` what the routers do in each forward pass of this block, live or replayed.

        `counted` [T] is a tensor on the device of the passes, True for the tokens that count; without it all do.
        Nothing is read from the device.
        """
        self._remember_checkpoints()
        with self._state.block(Measuring(gauge, counted)):
            yield

    def checkpoint_context(self) -> checkpoint.Contexts:
        """Return the contexts of the forward and of the recompute; pass this method to a checkpoint as `context_fn`.

        The recompute then uses the routes of its own forward. This is needed only for a checkpoint around a layer
        that is compiled by itself.
        """
        return checkpoint.contexts(self._state)

    def detach(self) -> None:
        """Restore the model to its state before this object was made; later replay and record blocks raise.

        Raises ReplayError if a block is open, if a replayed checkpointed forward still awaits its backward, or if
        other code replaced a wrapped method.
        """
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

    # -- private ----------------------------------------------------------------------------------

    def _remember_checkpoints(self) -> None:
        if not self._state.blocks:  # otherwise the block around this one has done it
            checkpoint.remember(self._model, self._state)

    def _refuse_unfit(self, rows: Rows, needed: Any) -> None:
        if rows.spec != self._spec:
            raise ReplayError(
                f"these routes are of another model: expected {self._spec}, got {rows.spec} "
                "(for a pipeline stage, use select_layers)"
            )
        if needed is not None:
            refuse_missing(rows, needed)
        if not rows.any_captured:
            raise ReplayError(
                f"none of the {len(rows)} rows is captured, so nothing would be replayed: for a live pass, call the "
                "model outside the block"
            )
