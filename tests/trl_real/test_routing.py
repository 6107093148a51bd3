"""The routing metrics stand in TRL's own log, as in that of our trainer."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

import numpy as np
import torch
from transformers import TrainerCallback

from router_replay.engines import Completion
from router_replay.integrations.trl.rows import predicts
from router_replay.rl.log.metrics import NAMES
from router_replay.routes import Routes
from tests.trl_real.makers import (
    EXPERTS,
    LAYERS,
    Losses,
    Watched,
    equal,
    imbalance,
    prompts,
    rows_of,
    weights,
)

Make = Callable[..., Any]


def test_r3_logs_the_load_of_the_engines_experts_and_how_often_the_routers_agree(make: Make) -> None:
    made = make("r3", kind=Losses, learning_rate=0.0)
    made.train()
    entry = made.state.log_history[0]
    used = np.concatenate([rows_of(batch) for batch, _ in made.seen])
    assert entry["routing/layers"] == list(range(LAYERS))
    assert entry["routing/load/layers"] == pytest.approx(imbalance(used), rel=1e-3)
    assert entry["routing/load"] == pytest.approx(imbalance(used).mean())
    assert entry["routing/load_worst"] == pytest.approx(imbalance(used).max())
    assert entry["routing/load_worst_layer"] == imbalance(used).argmax()
    assert 0 < entry["routing/confidence"] < 1
    assert 0 < entry["routing/entropy"] < math.log(EXPERTS)
    assert min(entry["routes/agreement/layers"]) == pytest.approx(entry["routes/agreement_worst"], rel=1e-3)
    assert entry["routes/agreement"] == pytest.approx(np.mean(entry["routes/agreement/layers"]), rel=1e-3)
    assert entry["routes/layers_out_of_line"] == 0
    names = {name for name in entry if name.startswith("routing/") or "agreement" in name}
    assert names <= set(NAMES)  # those of our trainer
    assert not any(name.startswith("routing/") for name in made.state.log_history[1])  # the second half of the batch


@pytest.mark.parametrize("checkpointing", [False, True])
def test_without_an_old_pass_the_loss_is_measured_and_its_recompute_is_not(make: Make, checkpointing: bool) -> None:
    made = make(
        "r3", kind=Losses, vllm_importance_sampling_correction=False, steps_per_generation=1, max_steps=1,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    measured = []
    add = made._routing["train"].gauge.add
    made._routing["train"].gauge.add = lambda *given: (measured.append(given), add(*given))
    made.train()
    [(batch, _)] = made.seen
    entry = made.state.log_history[0]
    assert "routes/old_replayed" not in entry
    assert len(measured) == 1
    assert entry["routing/load/layers"] == pytest.approx(imbalance(rows_of(batch)), rel=1e-3)


@pytest.mark.parametrize("engine", ["embedded", None])
@pytest.mark.parametrize("replay", ["off", "r2"])
def test_live_passes_are_measured_too(make: Make, replay: str, engine: str | None) -> None:
    made = make(replay, kind=Losses, engine=engine, learning_rate=0.0)
    made.train()
    used = []
    for batch, _ in made.seen:
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with made.replayer.record() as live, torch.no_grad():
            made.model(input_ids=tokens, attention_mask=mask)
        used.append(live.tensors.ids[predicts(mask).flatten()].numpy())
    entry = made.state.log_history[0]
    assert entry["routing/load/layers"] == pytest.approx(imbalance(np.concatenate(used)), rel=1e-3)
    assert not any("agreement" in name for name in entry)


def test_they_can_be_switched_off_and_change_no_weight(make: Make) -> None:
    trained = []
    for measures in (True, False):
        made = make("r3", trainer_routing_metrics=measures)
        made.train()
        entry = made.state.log_history[0]
        assert ("routing/load" in entry) == measures
        assert "routes/agreement/layers" in entry
        trained.append(weights(made))
    assert equal(*trained)


class Told(TrainerCallback):
    """Keeps what TRL's own tools get."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        self.logs.append(dict(logs))


def test_tools_get_numbers_and_the_history_gets_the_lists(make: Make, tmp_path: pathlib.Path) -> None:
    told = Told()
    made = make("r3", save_strategy="steps", save_steps=2, trainer_callbacks=[told])
    made.train()
    assert "routing/load" in told.logs[0]
    assert "routes/agreement_worst_layer" in told.logs[0]
    assert all(isinstance(value, int | float) for logs in told.logs for value in logs.values())
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text("utf-8"))
    assert saved["log_history"][0]["routing/load/layers"] == made.state.log_history[0]["routing/load/layers"]


def test_an_evaluation_between_two_logs_is_measured_by_itself(make: Make) -> None:
    runs = {}
    for evaluates in (False, True):
        more = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8} if evaluates else {}
        made = make("r3", kind=Losses, logging_steps=2, trainer_eval_dataset=prompts(4), learning_rate=0.0, **more)
        made.train()
        runs[evaluates] = made
    first, *_ = (one for one in runs[True].state.log_history if "eval_routing/load" in one)
    assert len(first["eval_routing/load/layers"]) == LAYERS
    assert first["eval_routing/layers"] == list(range(LAYERS))
    [plain], [beside] = ([one for one in made.state.log_history if "routing/load" in one] for made in runs.values())
    assert plain["routing/load/layers"] == beside["routing/load/layers"]
    assert plain["routes/agreement/layers"] == beside["routes/agreement/layers"]


class Renumbered(Watched):
    """An engine that reports the experts of one layer under other numbers."""

    def generate_each(self, requests: Any) -> list[list[Completion]]:
        return [
            [dataclasses.replace(one, routes=self._broken(one.routes)) for one in group]
            for group in super().generate_each(requests)
        ]

    def _broken(self, routes: Routes) -> Routes:
        ids = routes.ids.copy()
        ids[:, 1] = (ids[:, 1] + 5) % EXPERTS
        return Routes(ids, routes.spec, captured=routes.captured)


def test_a_broken_layer_of_the_engine_is_warned_of_once(
    make: Make, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = make("r3", engine=Renumbered(folder), max_steps=4, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, logger="router_replay"):
        made.train()
    entries = [one for one in made.state.log_history if "routes/agreement" in one]
    assert [one["routes/layers_out_of_line"] for one in entries] == [1, 1]
    assert [one["routes/agreement_worst_layer"] for one in entries] == [1, 1]
    [warning] = [one.getMessage() for one in caplog.records if "engine and trainer choose" in one.getMessage()]
    assert warning.startswith("step 1: in layer 1 ")
