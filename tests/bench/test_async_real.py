"""What the runs of bench.async_real with a random model are made of; the runs themselves take too long for a test."""

from __future__ import annotations

import argparse
import pathlib
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.async_real import SIZES, WARM_UP, Found, settings_of, show_run
from bench.random_lengths import RandomLengths
from bench.train_gpu import make_model
from router_replay.rl.config import check_config, load_config

TOKENIZER = types.SimpleNamespace(pad_token_id=0, eos_token_id=1)


def test_a_group_has_one_prompt_and_different_rewards() -> None:
    task = RandomLengths(TOKENIZER, 0, vocabulary=32)
    prompt = task.environment().reset(7)
    assert prompt == task.environment().reset(7) != task.environment().reset(8)
    assert len(prompt) == 16
    assert all(2 <= token < 32 for token in prompt)
    turn = task.environment().step([2, 3, 4, 1])
    assert turn.done
    assert turn.reward == 0.5
    assert task.environment().step([3, 5, 4, 1]).reward == 0.25


def test_the_model_ends_an_answer_with_the_same_probability_everywhere(tmp_path: pathlib.Path) -> None:
    make_model(tmp_path, tiny=True, vocabulary=40)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    tokens = torch.randint(2, 40, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ends = model(tokens).logits.float().softmax(-1)[..., tokenizer.eos_token_id]
    assert ends.mean().item() == pytest.approx(1 / 40, rel=0.1)
    assert ends.std().item() < 0.2 * ends.mean().item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_settings_are_accepted(tmp_path: pathlib.Path, size: str, device: str, loop: str) -> None:
    arguments = argparse.Namespace(device=device, engine=None, steps=5, set=["seed=3"])
    more = SIZES[size].asynchronous if loop == "async" else ()
    config = load_config(None, [*settings_of(SIZES[size], arguments, tmp_path), *more, f"loop={loop}"])
    assert not check_config(config, 1)
    assert config.steps == 5 + WARM_UP
    assert config.seed == 3
    assert config.engine.transfer == "auto"
    assert config.rollout.max_tokens < config.engine.max_length <= config.trainer.max_tokens


@pytest.mark.parametrize(("share", "verdict"), [(0.04, "kept"), (0.06, "MISSED")])
def test_medians_leave_the_warm_up_out(capsys: pytest.CaptureFixture[str], share: float, verdict: str) -> None:
    names = ["trainer_idle", "engine_idle", "staleness_mean", "staleness_max", "tokens_resumed", "tokens_wasted"]
    line = {
        **{f"async/{name}": 0.0 for name in names}, "tokens": 1000.0, "seconds/step": 2.0, "seconds/sync": 2 * share,
        "sync/share_of_step": share, "sync/cuda_ipc": 1.0, "seconds/rollout": 0.0, "seconds/score": 0.5,
        "seconds/update": 1.0, "response_length": 9.0, "episodes/dropped_stale": 0.0,
    }  # fmt: skip
    found = Found([{**line, "sync/share_of_step": 0.9}] * WARM_UP + [line] * 3, [20.0, 40.0, 42.0, 44.0, 47.0])
    assert found.step_seconds == [2.0, 2.0, 3.0]
    assert found.per_token == [2000.0, 2000.0, 3000.0]
    assert show_run("async", found, 0.05) == (verdict == "MISSED")
    said = capsys.readouterr().out
    assert f"{share:.1%} ({share:.1%} to {share:.1%}) (goal at most 5%): {verdict}" in said
    assert "by CUDA IPC" in said
    assert "started after 18 s" in said
