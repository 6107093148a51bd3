"""TRL's own options that meet replay: each runs with R3, with every row replayed and none live."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

import torch

from router_replay.engines import Request, Sampling
from router_replay.errors import ReplayError
from router_replay.routes import Routes
from tests.trl_real.makers import LENGTH, Losses, gap, prompts

Make = Callable[..., Any]


def entries(made: Any) -> list[dict[str, Any]]:
    return [entry for entry in made.state.log_history if "routes/live" in entry]


def all_replayed(made: Any) -> bool:
    return all(one["routes/replayed"] > 0 and one["routes/live"] == 0 for one in entries(made))


def test_num_iterations_trains_a_batch_again_with_its_rows(make: Make) -> None:
    made = make("r3", kind=Losses, num_iterations=2, max_steps=4)
    made.train()
    assert all_replayed(made)
    assert len(entries(made)) == 4
    assert len(made.engine.answers) == 16  # one rollout
    first, again = made.seen[0], made.seen[2]
    assert torch.equal(first[0]["completion_ids"], again[0]["completion_ids"])
    assert torch.equal(first[0]["routed_experts"], again[0]["routed_experts"])
    assert gap(*first) < 1e-5 < gap(*again)


@pytest.mark.parametrize(("per_generation", "accumulated"), [(1, 1), (2, 2), (1, 2), (4, 2)])
def test_every_schedule_of_generations_and_updates(make: Make, per_generation: int, accumulated: int) -> None:
    made = make(
        "r3", kind=Losses, steps_per_generation=per_generation, gradient_accumulation_steps=accumulated, max_steps=2
    )
    made.train()
    assert all_replayed(made)
    assert len(made.seen) == 2 * accumulated
    assert gap(*made.seen[0]) < 1e-5
    assert all("mismatch/k3" in entry for entry in entries(made)[:1])


def test_without_the_correction_and_without_an_old_pass_the_gap_is_measured_in_the_loss(make: Make) -> None:
    made = make("r3", kind=Losses, vllm_importance_sampling_correction=False, steps_per_generation=1, learning_rate=0.0)
    made.train()
    batch, logprobs = made.seen[0]
    assert "old_per_token_logps" not in batch
    assert "importance_sampling_ratio" not in batch
    entry = entries(made)[0]
    assert entry["mismatch/abs_max"] == pytest.approx(gap(batch, logprobs, "sampling_per_token_logps"), rel=1e-4)
    assert 0 < entry["routes/agreement"] <= 1
    assert all_replayed(made)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_importance_sampling_correction_gets_the_engines_log_probs(make: Make, mode: str) -> None:
    made = make("r3", kind=Losses, vllm_importance_sampling_mode=mode, max_steps=1)
    made.train()
    batch, _ = made.seen[0]
    mask = batch["completion_mask"].bool()
    difference = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).double()
    expected = difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference
    ratio = batch["importance_sampling_ratio"]
    assert torch.allclose(ratio.double()[mask.any(1)], expected.exp()[mask.any(1)], atol=1e-5)  # all within the clip
    assert all_replayed(made)


def test_truncated_completions_can_be_masked(make: Make) -> None:
    made = make("r3", kind=Losses, mask_truncated_completions=True, max_completion_length=3)
    made.train()
    cut = [one for _, one in made.engine.answers if one.finish_reason == "length"]
    assert cut
    assert len(cut) < len(made.engine.answers)
    assert all_replayed(made)
    whole = sum(len(one.token_ids) for _, one in made.engine.answers if one.finish_reason == "stop")
    assert sum(int(batch["completion_mask"].sum()) for batch, _ in made.seen) == whole


def test_slots_can_be_padded_to_a_multiple(make: Make) -> None:
    made = make("r3", kind=Losses, pad_to_multiple_of=8)
    made.train()
    batch, logprobs = made.seen[0]
    assert batch["completion_ids"].size(1) % 8 == batch["prompt_ids"].size(1) % 8 == 0
    assert gap(batch, logprobs) < 1e-5
    assert all_replayed(made)


@pytest.mark.parametrize("loss", ["dapo", "cispo", "sapo", "luspo", "dr_grpo"])
def test_other_losses(make: Make, loss: str) -> None:
    made = make("r3", loss_type=loss, max_steps=1)
    made.train()
    assert all_replayed(made)


def test_evaluation_samples_with_the_engine_too(make: Make) -> None:
    made = make(
        "r3", trainer_eval_dataset=prompts(4), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8
    )
    made.train()
    [entry] = [one for one in made.state.log_history if "eval_routes/live" in one]
    assert entry["eval_routes/live"] == 0
    assert entry["eval_routes/replayed"] > 0
    assert all_replayed(made)


def test_a_resumed_run_goes_on_with_replay(make: Make, tmp_path: pathlib.Path) -> None:
    made = make("r3", max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    resumed = make("r3", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert all_replayed(resumed)
    tokens = [[one.token_ids.tolist() for _, one in run.engine.answers] for run in (made, resumed)]
    assert tokens[0] != tokens[1]  # other seeds than at the start


def test_a_second_turn_continues_its_own_trajectory(make: Make) -> None:
    """The calls of TRL's tool loop: some sequences come back with what a tool said, as longer prompts."""
    made = make("r3")
    asked = [[3, 4, 12], [5, 6, 12, 7]]
    backend = made.vllm_generation
    _, first, logprobs, _ = backend.generate([asked[0]] * 2 + [asked[1]] * 2, None, num_generations=2)
    assert [len(one) for one in logprobs] == [len(one) for one in first]
    further = asked[1] + first[3] + [9, 9]
    [[second]] = [backend.generate([further], None, num_generations=1)[1]]
    request = made.engine.answers[-1][1]
    assert request.start == len(asked[1]) + len(first[3]) - 1  # the rows before it were known
    routes = backend.sequences.take(further + second)
    assert len(routes) == len(further) + len(second)
    assert routes.captured[:-1].all()
    cut = backend.sequences.take(asked[0] + first[0][:-1])  # TRL may cut the end off
    assert len(cut) == len(asked[0]) + len(first[0]) - 1


def own_rollout(asked: list[str], trainer: Any, *, with_routes: bool = True) -> dict[str, Any]:
    """A rollout_func of a user, who asks the engine and returns its routes."""
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in asked]
    done = trainer.engine.generate([Request(ids, Sampling(max_tokens=LENGTH, seed=3)) for ids in tokens])
    missing = Routes.missing(1, trainer.engine.spec)
    routes = {"routes": [Routes.concat([one.routes, missing]) for one in done]}
    return {
        "prompt_ids": tokens,
        "completion_ids": [one.token_ids.tolist() for one in done],
        "logprobs": [one.logprobs.tolist() for one in done],
        **(routes if with_routes else {}),
    }


def test_a_rollout_func_brings_its_own_routes(make: Make) -> None:
    made = make("r3", kind=Losses, trainer_rollout_func=own_rollout)
    made.train()
    assert all_replayed(made)
    assert gap(*made.seen[0]) < 1e-5
    assert made.engine.pushes == 1


def test_a_rollout_func_without_routes_is_refused(make: Make) -> None:
    made = make("r3", trainer_rollout_func=lambda asked, trainer: own_rollout(asked, trainer, with_routes=False))
    with pytest.raises(ReplayError, match='returned no "routes"'):
        made.train()


def test_missing_rows_raise_or_are_counted_as_live(make: Make) -> None:
    def with_a_gap(asked: list[str], trainer: Any) -> dict[str, Any]:
        found = own_rollout(asked, trainer)
        found["routes"][3] = Routes.concat([Routes.missing(2, trainer.engine.spec), found["routes"][3][2:]])
        return found

    with pytest.raises(ReplayError, match="2 rows are missing, the first in sequence 3"):
        make("r3", trainer_rollout_func=with_a_gap).train()
    made = make("r3", trainer_rollout_func=with_a_gap, trainer_on_missing="live")
    made.train()
    assert entries(made)[0]["routes/old_live"] == 2
