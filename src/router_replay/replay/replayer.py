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

import numpy as np
import torch
from torch import nn

from router_replay.batch import NO_LABEL, LocalBatch
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.replay import checkpoint
from router_replay.replay.discover import find_routers
from router_replay.replay.inner import device_of
from router_replay.replay.passes import Watch
from router_replay.replay.site import Site
from router_replay.replay.state import Plan, Recording, State
from router_replay.replay.stats import Counters, Stats
from router_replay.replay.wrapper import Wrapper
from router_replay.routes import Routes
from router_replay.spec import RouterSpec


class Recorded:
    """The routes of the passes of a record block: rows in token order, one pass after the other."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    @property
    def tensors(self) -> TensorRoutes:
        """On the model's device, in the narrow dtype: what `replay` takes without a round trip to the host."""
        pieces = self._recording.pieces
        rows = [sum(len(piece) for piece in column) for column in pieces]
        if not all(rows) or len(set(rows)) != 1:
            raise ReplayError(f"no complete forward pass ran in the record block: rows per routed layer are {rows}")
        columns = [column[0] if len(column) == 1 else torch.cat(column) for column in pieces]
        ids_TLK = torch.stack(columns, dim=1)
        captured = torch.ones(len(ids_TLK), dtype=torch.bool, device=ids_TLK.device)
        return TensorRoutes(ids_TLK, captured, self._recording.spec, True)

    @property
    def routes(self) -> Routes:
        return Routes(self.tensors.ids.cpu().numpy(), self._recording.spec)


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
        routes: Any,
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
        wanted = self._agreement if agreement is None else agreement
        plan = self._plan(routes, on_missing, loss_mask, idle, wanted)
        plan.start = start
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

    def _plan(self, routes: Any, on_missing: str, loss_mask: Any, idle: Any, agreement: bool) -> Plan:
        if on_missing not in ("raise", "live"):
            raise ReplayError(f'on_missing must be "raise" or "live", got {on_missing!r}')
        local = routes if isinstance(routes, LocalBatch) else None
        if isinstance(routes, Recorded):
            routes = routes.tensors
        elif not isinstance(routes, Routes | TensorRoutes) and hasattr(routes, "routes"):  # a batch
            loss_mask = getattr(routes, "label_mask", None) if loss_mask is None else loss_mask
            if idle is None and hasattr(routes, "labels"):
                idle = routes.labels == NO_LABEL
            routes = routes.routes
        if not isinstance(routes, Routes | TensorRoutes):
            raise ReplayError(
                f"replay needs routes, got {type(routes).__name__}: without routes a pass is live, outside the block"
            )
        if routes.spec != self._spec:
            raise ReplayError(
                f"these routes are of another model: {routes.spec}; the model's routers are {self._spec}"
                " (a pipeline stage takes its share by select_layers)"
            )
        if on_missing == "raise" and loss_mask is not None and not routes.all_captured:
            _refuse_missing(routes, loss_mask)
        if not (routes.captured.any() if isinstance(routes, Routes) else routes.any_captured):
            raise ReplayError(f"none of the {len(routes)} rows is captured: this would be a live pass")
        rows_replayed, rows_live = _count(routes, idle)
        from_host = isinstance(routes, Routes)
        if isinstance(routes, Routes):
            # FSDP1 keeps parameters flat, above the decoder. Then the pass says where it runs, and the plan moves.
            device = device_of(self._found.stack) or "cpu"
            kept = None if local is None else local.to_torch(device).routes
            routes = kept or TensorRoutes.from_routes(routes, device)
        width = len(self._spec.layers)
        return Plan(
            ids_TLK=routes.ids,
            live_T1=None if routes.all_captured else ~routes.captured.unsqueeze(-1),
            spec=self._spec,
            rows_replayed=rows_replayed,
            rows_live=rows_live,
            from_host=from_host,
            agree_L=torch.zeros(width, dtype=torch.int64, device=routes.ids.device) if agreement else None,
            compiled_passes=torch.zeros((), dtype=torch.int64, device=routes.ids.device),
        )


def _count(routes: Routes | TensorRoutes, idle: Any) -> tuple[Any, Any]:
    """Rows that are replayed, and rows that are live and not idle; tensors where only the device knows."""
    if routes.all_captured:
        return len(routes), 0
    captured_T = routes.captured if isinstance(routes, TensorRoutes) else torch.from_numpy(routes.captured.copy())
    live_T = ~captured_T
    if idle is not None:
        idle_T = torch.as_tensor(idle, device=captured_T.device).bool()
        if idle_T.shape != live_T.shape:
            raise ReplayError(f"idle has the shape {list(idle_T.shape)}, the routes have {len(live_T)} rows")
        live_T &= ~idle_T
    replayed, live = captured_T.sum(), live_T.sum()
    return (int(replayed), int(live)) if isinstance(routes, Routes) else (replayed, live)


def _refuse_missing(routes: Routes | TensorRoutes, loss_mask: Any) -> None:
    captured = routes.captured.cpu().numpy() if isinstance(routes, TensorRoutes) else routes.captured
    mask = loss_mask.cpu().numpy() if isinstance(loss_mask, torch.Tensor) else np.asarray(loss_mask)
    if mask.shape != captured.shape:
        raise ReplayError(f"loss_mask has the shape {list(mask.shape)}, the routes have {len(captured)} rows")
    missing = np.flatnonzero(mask.astype(bool) & ~captured)
    if len(missing):
        raise ReplayError(
            f"{len(missing)} rows that bear loss are missing, the first is row {missing[0]}: "
            'their tokens would be routed live. Pass on_missing="live" to allow that'
        )
