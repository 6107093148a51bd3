"""The adapters for miles, with a stand-in for miles' manager: miles itself was not run.

The stand-in keeps to what the adapters use of miles: `get_topk_fn`, which lets the router choose, or returns rows.
"""

from __future__ import annotations

import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from router_replay import RouterReplay
from router_replay.errors import ConfigError
from router_replay.families import measured
from router_replay.integrations import miles
from tests.makers import random_routes
from tests.replay import tiny


class Manager:
    def __init__(self) -> None:
        self.rows: list[Tensor] = []  # of each router, in call order; empty means that the routers choose

    def get_topk_fn(self, old_topk_fn: Callable[..., Any], return_probs: bool) -> Callable[..., Any]:
        assert return_probs

        def choose(scores: Tensor, topk: int) -> Any:
            if not self.rows:
                return old_topk_fn(scores, topk)
            rows = self.rows.pop(0)
            assert rows.shape == (scores.shape[0], topk)
            return scores.gather(1, rows), rows

        return choose


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two modules of miles that `register` imports."""
    found = types.ModuleType(miles.REGISTRY)
    found.adapters = []
    found.RoutingReplayAdapter = types.SimpleNamespace
    found.register_routing_replay_adapter = found.adapters.append
    held = types.ModuleType(miles.MANAGER)
    held.routing_replay_manager = found.manager = Manager()
    for name in {miles.REGISTRY, miles.MANAGER}:
        for parent in (name.rpartition(".")[0].rsplit(".", depth)[0] for depth in range(name.count("."))):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, miles.REGISTRY, found)
    monkeypatch.setitem(sys.modules, miles.MANAGER, held)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "minimax_m2", "llama4"])
def test_rows_of_miles_give_what_our_replay_gives(family: str, registry: Any) -> None:
    made = tiny.make(family)
    names = miles.register()
    assert family in names
    [adapter] = [one for one in registry.adapters if one.applies_to(made.model.config)]
    assert adapter.name == f"router_replay.{family}"

    replayer = RouterReplay(made.model)
    routes = random_routes(tiny.BATCH * tiny.LENGTH, replayer.spec, seed=1)
    live = made.model(**made.inputs).logits
    with replayer.replay(routes):
        expected = made.model(**made.inputs).logits
    replayer.detach()

    routers = [module for module in made.model.modules() if type(module).__name__ == adapter.module_cls_name]
    assert len(routers) == len(replayer.spec.layers)
    for router in routers:
        adapter.install(router)
    assert torch.equal(made.model(**made.inputs).logits, live)
    registry.manager.rows = [torch.from_numpy(routes.ids[:, place].astype("int64")) for place in range(len(routers))]
    assert torch.equal(made.model(**made.inputs).logits, expected)
    assert not torch.equal(expected, live)
    assert not registry.manager.rows


def test_the_code_of_the_page_registers_every_supported_family(registry: Any) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "integrations" / "miles.md"
    (code,) = re.findall(r"```python\n(.+?)```", page.read_text("utf-8"), re.DOTALL)
    exec(code, {})
    assert [one.name for one in registry.adapters] == [f"router_replay.{one.name}" for one in miles.supported()]


def test_families_that_choose_otherwise_are_left_to_miles() -> None:
    names = {family.name for family in miles.supported()}
    assert len(names) > 25
    assert not names & {"deepseek_v3", "glm4_moe", "dbrx", "phimoe", "switch_transformers"}
    assert all(measured.FAMILIES[name].router for name in names)


def test_a_miles_without_the_registry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this miles has no miles\.backends\.fsdp_utils\.adaptations"):
        miles.register()
