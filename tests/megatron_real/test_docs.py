"""The code of docs/megatron.md runs as it stands there."""

from __future__ import annotations

import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from torch import Tensor

from router_replay import Routes, Sample
from router_replay.replay.megatron import MegatronReplay
from tests.makers import random_ids, random_routes
from tests.megatron_real import native_api, tiny
from tests.megatron_real.test_one_rank import same

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "megatron.md"
PLAIN, RECORDED, BRIDGE, INSTALL = re.findall(
    r"^```python\n(.+?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
)
SPEC = tiny.RouterSpec(8, 2, (1, 2, 3), num_layers=4)


@pytest.fixture
def chunks() -> list[Any]:
    tiny.start()
    return tiny.megatron_model(tiny.hf_model(), **tiny.RECOMPUTE["full"])


def samples() -> list[Sample]:
    made = []
    for number, length in enumerate((8, 5, 6, 4)):
        captured = np.arange(length) < length - 1
        routes = Routes(random_ids(length, SPEC, number), SPEC, captured=captured)
        made.append(Sample(np.arange(length) + number, np.zeros(length), np.arange(length) > 1, routes))
    return made


def packed_step(losses: list[Tensor]) -> Callable[..., Any]:
    """A forward step over packed bins: each token attends to the earlier ones of its own sequence."""

    def forward_step(data: Any, model: Any) -> Any:
        batch = next(data)
        own = torch.from_numpy(batch.sample_ids)
        apart = own[:, None] != own[None]
        mask = torch.triu(torch.ones_like(apart), 1) | apart
        tokens = torch.from_numpy(batch.token_ids)[None]
        positions = torch.from_numpy(batch.position_ids)[None]
        out = model(tokens, positions, mask[None, None], labels=tokens.roll(-1))

        def loss(found: Tensor) -> Any:
            losses.append(found.detach())
            return found.sum(), {}

        return out, loss

    return forward_step


def test_the_training_step_and_the_recorded_one_run(chunks: list[Any]) -> None:
    losses: list[Tensor] = []
    names: dict[str, Any] = {
        "model_chunks": chunks,
        "trajectories": samples(),
        "seq_length": 10,
        "forward_step": packed_step(losses),
        "torch": torch,
    }
    exec(PLAIN, names)
    stats = names["replayer"].stats_of_all_ranks()
    assert stats.rows_replayed == (7 + 4 + 5 + 3,) * 3
    assert stats.rows_live == (0,) * 3
    assert len(losses) == len(names["micro_batches"]) > 1
    trained = tiny.gradients(chunks[0])
    assert trained["decoder.layers.1.mlp.router.weight"].abs().sum() > 0

    exec(RECORDED, names)
    bins = names["micro_batches"]
    assert [len(routes) for routes in names["routes"]] == [len(one.token_ids) for one in bins]
    with names["replayer"].replay(names["routes"], **names["shape"]):
        names["schedule"](forward_only=False)
    count = len(bins)
    for first, second in zip(losses[count : 2 * count], losses[3 * count :], strict=True):
        assert torch.equal(first, second)


@pytest.fixture
def bridge(chunks: list[Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for Megatron-Bridge, which needs Transformer Engine: it calls what Bridge's loop calls, in that order.

    So this shows that the callback fits this package, not that it fits Bridge.
    """
    batches = [tiny.tokens(2, sequences=2, seed=step) for step in range(2)]
    progress = types.SimpleNamespace(step=0)
    context = types.SimpleNamespace(model=chunks, state=types.SimpleNamespace(train_state=progress))
    seen: dict[str, Any] = {"steps": [], "batches": batches}

    def pretrain(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        (callback,) = callbacks
        seen["callback"] = callback
        callback.on_train_start(context)
        for step in range(2):
            progress.step = step
            callback.on_train_step_start(context)
            seen["steps"].append(tiny.train_step(chunks, batches[step]))
            callback.on_train_step_end(context)
            tiny.train_step(chunks, batches[step], forward_only=True)  # an evaluation, outside of the block

    for name, contents in {"callbacks": {"Callback": object}, "gpt_step": {"forward_step": None}}.items():
        module = types.ModuleType(f"megatron.bridge.training.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module = types.ModuleType("megatron.bridge.training.pretrain")
    vars(module)["pretrain"] = pretrain
    for parent in ("megatron.bridge", "megatron.bridge.training"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_the_callback_for_bridge_opens_a_block_around_each_step(chunks: list[Any], bridge: dict[str, Any]) -> None:
    steps = [[random_routes(16, SPEC, 2 * step + number) for number in range(2)] for step in range(2)]
    config = types.SimpleNamespace(
        train=types.SimpleNamespace(micro_batch_size=2), model=types.SimpleNamespace(seq_length=tiny.LENGTH)
    )
    exec(BRIDGE, {"config": config, "routes_of": steps.__getitem__})
    replayer = bridge["callback"].replayer
    assert replayer.stats.rows_replayed == (64, 64, 64)
    assert replayer.stats.passes == 4
    for got, batches, routes in zip(bridge["steps"], bridge["batches"], steps, strict=True):
        with replayer.replay(routes, micro_batch_size=2):
            same(got, tiny.train_step(chunks, batches))


def test_install_runs(chunks: list[Any]) -> None:
    names: dict[str, Any] = {}
    exec(INSTALL, names)
    try:
        (chunk,) = tiny.megatron_model(tiny.hf_model(), moe_enable_routing_replay=True, **tiny.RECOMPUTE["full"])
        batches, routes = tiny.tokens(2), [random_routes(16, SPEC, seed) for seed in range(2)]
        step = native_api.replay_step([chunk], batches, routes, switch=False)
        assert names["installation"].stats.rows_replayed == (32, 32, 32)
        with MegatronReplay(chunks).replay(routes, micro_batch_size=2):
            same(tiny.train_step(chunks, batches), step)
    finally:
        names["installation"].uninstall()
        native_api.RouterReplay.clear_global_router_replay_instances()
