"""A router that chooses by `torch.topk` in its own code runs a copy of it with another `topk`, and no mode."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from router_replay.families import Choice
from router_replay.replay.own_code import calls_topk, with_topk
from router_replay.replay.selection import Selection
from router_replay.replay.site import Site

FACTOR = 2.0


def choose(scores: Tensor, k: int = 1, *, factor: float = 1.0) -> Any:
    return torch.topk(scores * factor * FACTOR, k)


def helper(scores: Tensor) -> Any:
    return choose(scores)


def method(scores: Tensor) -> Any:
    return scores.topk(1) if torch.is_tensor(scores) else None


def test_a_copy_has_another_topk_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def topk(scores: Tensor, k: int) -> str:
        seen.append(scores)
        return f"the first {k}"

    assert with_topk(choose, topk)(torch.ones(2), factor=3.0) == "the first 1"
    monkeypatch.setitem(choose.__globals__, "FACTOR", 5.0)  # a global that changed after the function was defined
    assert with_topk(choose, topk)(torch.ones(2), 2) == "the first 2"
    assert [float(one[0]) for one in seen] == [6.0, 5.0]
    assert choose(torch.tensor([1.0, 3.0]))[1].item() == 1  # the function itself is as before
    assert choose.__globals__["torch"] is torch


def test_a_copy_keeps_what_its_function_closes_over() -> None:
    def outer(added: float) -> Any:
        return lambda scores: torch.topk(scores + added, 1)

    assert with_topk(outer(4.0), lambda scores, k: scores)(torch.zeros(1)).item() == 4.0


def test_only_the_code_that_calls_topk_itself_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_topk(choose, choose.__code__)
    assert not calls_topk(helper, choose.__code__)  # the choice is made in a function that it calls
    assert not calls_topk(choose, None)
    assert not calls_topk(torch.topk, choose.__code__)
    monkeypatch.setitem(choose.__globals__, "torch", types.SimpleNamespace(topk=torch.topk))
    assert not calls_topk(choose, choose.__code__)


@pytest.mark.parametrize(
    ("function", "expected"), [(choose, choose.__code__), (helper, choose.__code__), (method, None)]
)
def test_the_mode_notes_the_code_that_chose(function: Any, expected: Any) -> None:
    router: Any = types.SimpleNamespace(layer=0, num_experts=4, top_k=1, num_groups=1)
    with Selection(router, torch.tensor([[3]]), None, compare=False) as selection:
        function(torch.rand(1, 4))
    assert selection.choosers == [expected]


@pytest.mark.parametrize(
    ("kind", "calls", "previous", "learned"),
    [
        (Choice.TOP_K, 1, None, True),
        (Choice.GROUPED, 1, None, False),  # the choice of groups may be elsewhere
        (Choice.TOP_K, 2, None, False),
        (Choice.TOP_K, 1, choose, False),  # other code stands in place of the method
    ],
)
def test_a_router_is_learned_if_one_call_of_topk_is_its_whole_choice(
    kind: Choice, calls: int, previous: Any, learned: bool
) -> None:
    site: Any = types.SimpleNamespace(
        router=types.SimpleNamespace(choice=kind), previous=previous, of_class=lambda: choose, chooser=None
    )
    selection: Any = types.SimpleNamespace(choosers=[choose.__code__] * calls)
    Site._learn_chooser(site, selection)
    assert site.chooser is (choose if learned else None)
