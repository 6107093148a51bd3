"""Weights that are swapped into the embedded engine, in the middle of a generation too, and those that do not fit."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from router_replay.engines import Request
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.errors import EngineError
from tests.engines.conftest import GREEDY, Checkpoints, one, prompt, same
from tests.engines.embedded.gate import SEEDED, Gate, in_thread, landed


@pytest.mark.parametrize("in_flight", ["keep", "abort", "wait"])
def test_a_swap_in_the_middle_is_exact(engine: EmbeddedEngine, checkpoints: Checkpoints, in_flight: Any) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    other = AutoModelForCausalLM.from_pretrained(checkpoints.b)
    gate = Gate(engine, 4)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    update, late = gate.then(
        lambda: engine.update_weights(other, 4, in_flight), lambda: one(engine, Request(prompt(1), GREEDY))
    )
    landed(update)
    completion = landed(running)
    tokens, old = {"keep": (20, 5), "abort": (5, 5), "wait": (20, 20)}[in_flight]
    assert len(completion.token_ids) == tokens
    assert completion.versions.tolist() == [3] * old + [4] * (tokens - old)
    assert completion.routes.versions.tolist() == [3] * (len(prompt()) - 1 + old) + [4] * (tokens - old)
    assert np.array_equal(completion.logprobs[:old], before.logprobs[:old])
    rows = len(prompt()) - 1 + old
    assert completion.routes[:rows].same_sets(before.routes[:rows])
    assert set(landed(late).versions) == {4}  # came after the swap was asked for
    with EmbeddedEngine(checkpoints.b) as fresh:
        assert same(one(engine, Request(prompt(), GREEDY)), one(fresh, Request(prompt(), GREEDY)))
    if in_flight == "keep":  # the first token after the swap is of B's weights over A's keys, neither one's alone
        assert abs(completion.logprobs[old] - before.logprobs[old]) > 1e-3


@pytest.mark.parametrize("kind", ["folder", "state dict", "module"])
def test_the_same_weights_change_no_bit(
    engine: EmbeddedEngine, model_a: Any, checkpoints: Checkpoints, kind: str
) -> None:
    before = one(engine, Request(prompt(), SEEDED))
    again = AutoModelForCausalLM.from_pretrained(checkpoints.a)
    source = {"folder": checkpoints.a, "state dict": again.state_dict(), "module": again}[kind]
    with torch.no_grad():
        model_a.model.layers[1].mlp.gate.e_score_correction_bias.add_(1.0)  # so that doing nothing would show
        model_a.lm_head.weight.mul_(1.5)
    engine.update_weights(source, 4)
    assert same(one(engine, Request(prompt(), SEEDED)), before)
    assert engine.version == 4


def without(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if "layers.2.mlp.gate.weight" not in name}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (without, r"missing .*layers\.2\.mlp\.gate\.weight"),
    "unexpected": (lambda state: {**state, "extra.weight": torch.zeros(1)}, r"unexpected extra\.weight"),
    "shape": (lambda state: {**state, "lm_head.weight": torch.zeros(3, 64)}, r"lm_head\.weight|MISMATCH|mismatch"),
}


@pytest.mark.parametrize("from_folder", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit_are_refused_and_touch_nothing(
    engine: EmbeddedEngine,
    model_a: Any,
    checkpoints: Checkpoints,
    tmp_path: pathlib.Path,
    wrong: str,
    from_folder: bool,
) -> None:
    spoil, message = WRONG[wrong]
    source: Any = spoil(model_a.state_dict())
    if from_folder:
        save_file(
            spoil(load_file(f"{checkpoints.b}/model.safetensors")), tmp_path / "model.safetensors", {"format": "pt"}
        )
        source = tmp_path
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    [update] = gate.then(lambda: engine.update_weights(source, 4, "abort"))
    with pytest.raises(EngineError, match=message):
        landed(update)
    assert landed(running).finish_reason == "length"
    assert engine.version == 3
    assert same(one(engine, Request(prompt(), GREEDY)), landed(running))


class Holder(torch.nn.Module):
    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: Any) -> Any:
        return self.policy(**inputs)


def test_a_wrapped_model_generates_and_takes_weights_like_the_model_inside(checkpoints: Checkpoints) -> None:
    wrapped = Holder(AutoModelForCausalLM.from_pretrained(checkpoints.a))
    with EmbeddedEngine(checkpoints.a) as plain, EmbeddedEngine(wrapped) as engine:
        assert same(one(engine, Request(prompt(), GREEDY)), one(plain, Request(prompt(), GREEDY)))
        plain.update_weights(checkpoints.b, 1)
        expected = one(plain, Request(prompt(), GREEDY))
        for version, source in enumerate((checkpoints.b, Holder(AutoModelForCausalLM.from_pretrained(checkpoints.b)))):
            engine.update_weights(source, version + 1)
            found = one(engine, Request(prompt(), GREEDY))
            assert np.array_equal(found.token_ids, expected.token_ids)
            assert np.array_equal(found.logprobs, expected.logprobs)
