"""The routing metrics of an update stand beside the counts of rows in verl's metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.verl_real import tiny

# isort: split
from router_replay.rl.log.metrics import NAMES

ROUTERS = {"routing/load", "routing/load_worst", "routing/confidence", "routing/entropy"}
AGREEMENT = {"routes/agreement", "routes/agreement_worst", "routes/layers_out_of_line"}
COUNTS = {"routes/replayed", "routes/live"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp, packed": {"strategy": "fsdp"},
    "fsdp2, padded": {"strategy": "fsdp2", "use_remove_padding": False},
    "fsdp2, no checkpointing": {"strategy": "fsdp2", "enable_gradient_checkpointing": False},
}


def imbalance(outputs: list[Any]) -> np.ndarray:
    """The busiest expert over the mean in each layer, of the rows that a loss depends on."""
    rows = [len(output.prompt_ids) + int(np.flatnonzero(output.response_mask)[-1]) for output in outputs]
    parts = [output.routed_experts[:count, tiny.SPEC.layers] for output, count in zip(outputs, rows, strict=True)]
    ids_TLK = np.concatenate(parts)
    load_LE = np.stack([np.bincount(ids_TLK[:, layer].ravel(), minlength=tiny.SPEC.num_experts) for layer in (0, 1)])
    return load_LE.max(axis=1) / load_LE.mean(axis=1)


@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=LAYOUTS)
def test_an_update_has_the_load_of_the_rows_without_padding(model: str, settings: dict[str, Any]) -> None:
    outputs = tiny.rollouts()
    layout = {"use_remove_padding": settings.get("use_remove_padding", True)}
    metrics, _ = tiny.train(tiny.engine(model, **settings), tiny.batch_of(outputs, **layout))
    assert metrics["routing/load"] == [pytest.approx(imbalance(outputs).mean())]
    assert metrics["routing/load_worst"] == [pytest.approx(imbalance(outputs).max())]
    assert 0 < metrics["routing/confidence"][0] < 1
    assert 0 < metrics["routing/entropy"][0] <= math.log(tiny.SPEC.num_experts)
    assert metrics["routes/agreement"][0] < 0.3  # random rows
    assert set(NAMES) >= set(metrics) == ROUTERS | AGREEMENT | COUNTS | {"grad_norm"}


def test_a_scoring_pass_is_not_measured(model: str) -> None:
    """verl drops its metrics, and the update has the same tokens."""
    engine = tiny.engine(model)
    assert set(tiny.score(engine, tiny.batch_of(tiny.rollouts()))["metrics"]) == COUNTS
    metrics, _ = tiny.train(engine, tiny.batch_of(tiny.rollouts()))
    assert metrics["routing/load"] == [pytest.approx(imbalance(tiny.rollouts()).mean())]


def recorded(engine: Any) -> Any:
    """A batch with the rows that the model chooses itself."""
    data = tiny.batch_of(tiny.rollouts())
    data["routed_experts"] = tiny.score(engine, data.exclude("routed_experts"))["routed_experts"]
    return data


def test_r2_measures_the_routers_and_has_no_engine_to_agree_with(model: str) -> None:
    engine = tiny.engine(model, "R2")
    metrics, _ = tiny.train(engine, recorded(engine))
    assert set(metrics) == ROUTERS | COUNTS | {"grad_norm"}


def test_a_broken_layer_of_the_engine_is_warned_of_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = recorded(tiny.engine(model, "R2"))
    whole, _ = tiny.train(tiny.engine(model), data)
    assert whole["routes/agreement"] == [1.0]
    assert whole["routes/layers_out_of_line"] == [0]
    routes = data["routed_experts"]
    ids = routes.values().clone()
    ids[:, 2] = (ids[:, 2] + 3) % tiny.SPEC.num_experts  # the experts of one layer under other numbers
    broken = tiny.batch_of(tiny.rollouts())
    broken["routed_experts"] = torch.nested.nested_tensor_from_jagged(ids, routes.offsets())
    engine = tiny.engine(model)
    capsys.readouterr()
    for _ in range(2):
        with engine.train_mode():
            output = engine.forward_backward_batch(broken, tiny.loss_of)  # the weights stay as they are
        assert output["metrics"]["routes/layers_out_of_line"] == [1]
    text = capsys.readouterr().out
    assert text.count("engine and trainer choose the same experts") == 1
    assert "[router_replay] step 1: in layer 2 " in text
