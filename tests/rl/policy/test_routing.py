"""The routing metrics of a policy and of a step: in every mode, and a warning for a layer that is out of line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from router_replay import Routes
from router_replay.replay.stats import Stats
from router_replay.rl.config import TrainConfig
from router_replay.rl.loop.routing_values import OutOfLine, routing_values
from router_replay.rl.loop.train import train
from router_replay.rl.policy import delivery
from router_replay.rl.policy.policy import Policy
from router_replay.run_files import read_layers, read_metrics
from tests.rl.policy.test_policy import ONE, mini_batch, samples
from tests.rl.policy.test_policy import make as make  # the fixture


@pytest.mark.parametrize("old", ["policy", "rollout"])
@pytest.mark.parametrize("mode", ["off", "r3"])
def test_figures_are_of_the_experts_that_were_used(make: Callable[..., Policy], mode: str, old: str) -> None:
    policy = make(f"replay={mode}", f"loss.old={old}")
    mini = mini_batch(policy)
    with policy.replayer.record() as recording:
        policy.update(mini, policy.score(mini))
    figures = policy.router_figures()
    assert figures is not None
    used = recording.routes[: len(mini.micro[0].labels)]
    counted = mini.micro[0].labels >= 0
    assert figures.rows == counted.sum() == 19  # the last token of each sequence predicts nothing
    load = [np.bincount(used.ids[counted, layer].ravel(), minlength=policy.spec.num_experts) for layer in range(3)]
    assert np.array_equal(figures.load, np.stack(load))
    again = policy.router_figures()
    assert again is not None
    assert again.rows == 0  # counted since the last call


def test_replayed_rows_that_are_not_the_routers_choice_lower_its_confidence(make: Callable[..., Policy]) -> None:
    found = {}
    for mode in ("off", "r3"):
        policy = make(f"replay={mode}")
        policy.score(mini_batch(policy))  # random rows
        figures = policy.router_figures()
        assert figures is not None
        found[mode] = figures
    assert (found["r3"].confidence < found["off"].confidence).all()
    assert found["r3"].entropy[0] == found["off"].entropy[0]


def test_padding_and_sequences_without_a_loss_are_not_counted(make: Callable[..., Policy]) -> None:
    policy = make("replay=off")
    made = samples(policy)
    filler = dataclasses.replace(made[0], loss_mask=np.zeros(len(made[0]), bool))
    for parts in (made, [*made, filler]):
        [[mini]] = delivery.plan([parts], ONE, 64, "raise", row_multiple=4)  # rows of one length, with padding
        policy.score(mini)
        figures = policy.router_figures()
        assert figures is not None
        assert figures.rows == 19
        assert (figures.load.sum(axis=1) == 19 * policy.spec.top_k).all()


def test_they_can_be_switched_off(make: Callable[..., Policy]) -> None:
    policy = make("trainer.routing_metrics=false")
    policy.score(mini_batch(policy))
    assert policy.router_figures() is None


@pytest.mark.parametrize("how", [["replay=r2"], ["loop=async", "replay=r3"]], ids=["sync", "async"])
def test_a_run_writes_them_per_layer(make_config: Callable[..., TrainConfig], how: list[str]) -> None:
    config = make_config(*how, "steps=2")
    train(config)
    lines, layers = read_metrics(config.output), read_layers(config.output)
    assert [line["step"] for line in lines] == [line["step"] for line in layers] == [0, 1]
    for line, lists in zip(lines, layers, strict=True):
        assert lists["routing/layers"] == [0, 1, 2]
        assert all(len(lists[f"routing/{name}/layers"]) == 3 for name in ("load", "confidence", "entropy"))
        assert not any(name.endswith("/layers") for name in line)
        assert line["routing/load"] == pytest.approx(np.mean(lists["routing/load/layers"]), rel=1e-3)
        worst = int(np.argmax(lists["routing/load/layers"]))
        assert (line["routing/load_worst_layer"], line["routes/layers_out_of_line"]) == (worst, 0)
        assert line["routing/load_worst"] >= line["routing/load"] >= 1
        assert 0 < line["routing/confidence"] <= 1
        assert 0 < line["routing/entropy"] <= math.log(16)
        assert line["routes/agreement_worst"] == min(lists["routes/agreement/layers"])


def compared(*agreement: float, rows: int = 4000) -> Stats:
    return Stats.compared(tuple(range(1, len(agreement) + 1)), rows, agreement)


def test_a_layer_out_of_line_is_warned_of_once() -> None:
    watch = OutOfLine()
    assert watch.warnings(compared(0.99, 0.98, 0.97, 0.95), 0) == []
    [warning] = watch.warnings(compared(0.99, 0.98, 0.2, 0.95), 3)
    assert "step 3: in layer 3" in warning
    assert "20.0 % of the tokens" in warning
    assert "98.0 % (median)" in warning
    assert watch.warnings(compared(0.99, 0.98, 0.2, 0.95), 4) == []
    [second] = watch.warnings(compared(0.1, 0.98, 0.2, 0.95, 0.97), 5)
    assert "layer 1" in second
    assert watch.warnings(Stats.live((1, 2), 10), 6) == []


def test_the_counter_counts_them_in_every_step() -> None:
    values = routing_values(compared(0.99, 0.98, 0.2, 0.95), None)
    assert values["routes/layers_out_of_line"] == 1
    assert (values["routes/agreement_worst"], values["routes/agreement_worst_layer"]) == (0.2, 3)
    assert values["routes/agreement/layers"] == [0.99, 0.98, 0.2, 0.95]
    assert routing_values(Stats.live((1, 2), 10), None) == {}


def test_a_broken_layer_of_the_engine_is_named_in_the_run(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """An engine that reports the experts of one layer under other numbers."""
    from router_replay.rl.loop import first_rank

    def broken(episodes: Any, config: Any, wanted: Any) -> Any:
        made, numbers = samples_of(episodes, config, wanted)
        return [dataclasses.replace(sample, routes=renumbered(sample.routes)) for sample in made], numbers

    def renumbered(routes: Any) -> Routes:
        ids = routes.ids.copy()
        ids[:, 1] = (ids[:, 1] + 5) % routes.spec.num_experts
        return Routes(ids, routes.spec, captured=routes.captured)

    samples_of = first_rank.samples_of
    monkeypatch.setattr(first_rank, "samples_of", broken)
    config = make_config("replay=r3", "steps=2", "rollout.prompts=6")
    train(config)
    assert [line["routes/layers_out_of_line"] for line in read_metrics(config.output)] == [1, 1]
    assert capsys.readouterr().out.count("in layer 1 engine and trainer choose the same experts") == 1
