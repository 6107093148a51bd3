"""Rows reach the right tokens of TRL's passes: R3, R2 and off, checkpointed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

import torch
from trl import GRPOTrainer

from router_replay.integrations.trl.rows import CAPTURED, IDS
from tests.trl_real.makers import LAYERS, SEQUENCES, Losses, equal, gap, weights

Make = Callable[..., Any]


def test_the_rows_of_the_loss_are_those_that_the_engine_returned(make: Make) -> None:
    """After TRL has padded, shuffled and split them, bit for bit."""
    made = make("r3", kind=Losses)
    made.train()
    answers = {(prompt, tuple(one.token_ids.tolist())): one.routes for prompt, one in made.engine.answers}
    orders = []
    for batch, _ in made.seen:
        for number in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()]
            completion = batch["completion_ids"][number][batch["completion_mask"][number].bool()]
            routes = answers[tuple(prompt.tolist()), tuple(completion.tolist())]
            captured = batch[CAPTURED][number]
            assert int(captured.sum()) == len(prompt) + len(completion) - 1 == len(routes)
            assert torch.equal(batch[IDS][number][captured], torch.from_numpy(routes.ids))
            orders.append(tuple(prompt.tolist()))
    assert orders != sorted(orders, key=orders.index)  # TRL has shuffled the groups


def test_the_loss_and_the_old_pass_compute_the_same_before_the_first_update(make: Make) -> None:
    """With the rows of a neighbour they would not: that is what makes this test see a mix-up."""
    made = make("r3", kind=Losses)
    made.train()
    batch, logprobs = made.seen[0]
    assert gap(batch, logprobs) < 1e-5
    wrong = batch | {IDS: batch[IDS].roll(1, 0), CAPTURED: batch[CAPTURED].roll(1, 0)}
    made._compute_loss(made.model, wrong)
    assert gap(*made.seen[-1]) > 1e-2


def test_r3_has_the_gap_of_arithmetic_only_and_r2_and_off_that_of_routing(make: Make) -> None:
    k3 = {}
    for replay in ("off", "r2", "r3"):
        made = make(replay, learning_rate=0.0)
        made.train()
        entry = made.state.log_history[0]
        k3[replay] = entry["mismatch/k3"]
        assert (entry["routes/old_live"] == 0) == (replay == "r3")
        assert (entry["routes/replayed"] > 0) == (replay != "off")
        assert (entry["routes/live"] == 0) == (replay != "off")
        assert ("routes/agreement" in entry) == (replay == "r3")
    assert k3["r2"] == k3["off"]
    assert k3["r3"] < k3["off"] / 2


def test_r2_replays_the_experts_of_the_old_pass_after_the_weights_have_moved(make: Make) -> None:
    made = make("r2", kind=Losses, num_iterations=2, max_steps=4)
    made.train()
    assert len(made.seen) == 4
    for batch, _ in made.seen:
        assert batch[CAPTURED].all()
    batch, logprobs = made.seen[0]
    assert gap(batch, logprobs) < 1e-5
    last, _ = made.seen[-1]
    with made.replayer.record() as live, torch.no_grad():
        tokens = torch.cat([last["prompt_ids"], last["completion_ids"]], 1)
        mask = torch.cat([last["prompt_mask"], last["completion_mask"]], 1)
        made.model(input_ids=tokens, attention_mask=mask)
    assert not torch.equal(live.tensors.ids.unflatten(0, tokens.shape).sort(-1).values, last[IDS].sort(-1).values)


@pytest.mark.parametrize("replay", ["r3", "r2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_weights_to_the_bit(make: Make, replay: str, reentrant: bool) -> None:
    trained = []
    for checkpointing in (False, True):
        made = make(
            replay,
            router_aux_loss_coef=0.0,  # a reentrant checkpoint loses its gradient, with and without replay
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant} if checkpointing else None,
        )
        made.train()
        trained.append(weights(made))
    assert equal(*trained)


def test_off_without_an_engine_is_trl(make: Make) -> None:
    trained = []
    for kind in (GRPOTrainer, None):
        made = make("off", kind=kind, engine=None)
        made.train()
        trained.append(weights(made))
    assert equal(*trained)


def test_r2_works_with_trls_own_generation(make: Make) -> None:
    made = make("r2", engine=None, kind=Losses, steps_per_generation=2)
    made.train()
    entry = made.state.log_history[0]
    assert entry["routes/replayed"] > 0
    assert entry["routes/live"] == 0
    assert "mismatch/k3" not in entry  # transformers' generate returns no log-probs
    assert gap(*made.seen[0]) < 1e-5


def test_the_counts_are_those_of_the_tokens(make: Make) -> None:
    made = make("r3", max_steps=1)
    made.train()
    rows = sum(len(prompt) + len(one.token_ids) - 1 for prompt, one in made.engine.answers)
    entry = made.state.log_history[0]
    assert entry["routes/old_replayed"] == rows
    assert len(made.engine.answers) == SEQUENCES
    stats = made.replayer.stats
    assert len(stats.layers) == LAYERS
    assert set(stats.rows_live) == {0}
