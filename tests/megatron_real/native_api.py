"""Code as callers of Megatron's own RouterReplay write it, and what its tests share.

The steps use nothing of router_replay: the same code runs with and without `install()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.megatron_real import tiny

# isort: split
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from router_replay.replay.megatron import MegatronReplay
from tests.makers import random_routes

SPEC = tiny.RouterSpec(8, 2, (1, 2, 3), num_layers=4)


def rows_of(routes: Any, sequences: int = 2) -> dict[int, Tensor]:
    """The rows of one micro-batch by layer, in the order of the hidden states [s, b]."""
    ids = torch.from_numpy(routes.ids.astype("int64"))
    ids = ids.unflatten(0, (sequences, -1)).transpose(0, 1).flatten(0, 1)
    ids[~torch.from_numpy(routes.captured.reshape(sequences, -1).T.flatten())] = -1
    return {layer: ids[:, number] for number, layer in enumerate(routes.spec.layers)}


def decoder_routers(chunk: Any) -> list[Any]:
    return [module for module in chunk.decoder.modules() if isinstance(module, TopKRouter)]


def set_action_of(chunk: Any, action: RouterReplayAction) -> None:
    for router in decoder_routers(chunk):
        router.router_replay.set_router_replay_action(action)


def set_rows_of(chunk: Any, rows: dict[int, Tensor]) -> None:
    for router in decoder_routers(chunk):
        router.router_replay.set_target_indices(rows[router.layer_number - 1])


def replay_step(
    chunks: Sequence[Any],
    batches: Sequence[Tensor],
    routes: Sequence[Any],
    switch: bool = True,
    clear: bool = True,
    forward_only: bool = False,
    fail_at: int = -1,
) -> tiny.Step:
    """A training step with the rows of each micro-batch, in every schedule.

    `switch` is the change to REPLAY_BACKWARD after each forward pass, which the caller must not forget. `clear` is the
    clean-up after the schedule. Micro-batch `fail_at` raises after its forward pass.
    """
    counts = {id(chunk): 0 for chunk in chunks}

    def run(model: Any, batch: Tensor) -> Tensor:
        number = counts[id(model)]
        counts[id(model)] += 1
        set_rows_of(model, rows_of(routes[number]))
        set_action_of(model, RouterReplayAction.REPLAY_FORWARD)
        out = tiny.forward(model, batch)
        if switch:
            set_action_of(model, RouterReplayAction.REPLAY_BACKWARD)
        if number == fail_at:
            raise RuntimeError(f"micro-batch {number} fails")
        return out

    step = tiny.train_step(chunks, batches, forward_only, run=run)
    if clear:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()
    return step


def warm_up_step(
    chunk: Any, batches: Sequence[Tensor], routes: Sequence[Any], switch: bool = True, order: Sequence[int] = (0, 1)
) -> dict[str, Tensor]:
    """All forward passes, then all backward passes in `order`: what the first stage of a pipeline runs at the start."""
    chunk.zero_grad()
    losses = []
    for batch, one in zip(batches, routes, strict=True):
        RouterReplay.set_replay_data(list(rows_of(one).values()))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        losses.append(tiny.forward(chunk, batch).sum())
    if switch:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    for number in order:
        losses[number].backward()
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    return tiny.gradients(chunk)


# -- for the tests ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Begin and end with an empty list of routers, and check that nothing stays installed."""
    RouterReplay.clear_global_router_replay_instances()
    methods = {name: RouterReplay.__dict__[name] for name in vars(RouterReplay)}
    router = TopKRouter.__init__, TopKRouter.routing
    yield
    RouterReplay.clear_global_router_replay_instances()
    assert {name: RouterReplay.__dict__[name] for name in vars(RouterReplay)} == methods
    assert (TopKRouter.__init__, TopKRouter.routing) == router


def native_model(hf: Any, kind: str = "none", **changes: Any) -> Any:
    (chunk,) = tiny.megatron_model(hf, moe_enable_routing_replay=True, **tiny.RECOMPUTE[kind], **changes)
    return chunk


def two_routes(missing: tuple[int, ...] = ()) -> list[Any]:
    made = [random_routes(16, SPEC, seed) for seed in range(2)]
    return [tiny.with_missing(one, list(missing)) if missing else one for one in made]


def expected_gradients(hf: Any, routes: list[Any], batches: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of the same two micro-batches under MegatronReplay, without recompute."""
    (chunk,) = tiny.megatron_model(hf)
    with MegatronReplay(chunk).replay(routes, micro_batch_size=2):
        for batch in batches:
            tiny.forward(chunk, batch).sum().backward()
    return tiny.gradients(chunk)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def with_row(rows: Tensor, row: int, ids: list[int]) -> Tensor:
    rows = rows.clone()
    rows[row] = torch.tensor(ids)
    return rows
